"""The reference vision-language model at test size, and batches for it: different data for every sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hetero.models import VisionLanguageModule
from lightning_hetero.models.decoder import DecoderConfig
from lightning_hetero.models.vit import VisionConfig

PLACEHOLDER = 3
TOKENS_PER_IMAGE = 4
SEQUENCE = 20


class SmallModule(VisionLanguageModule):
    """AdamW at a constant rate, float64."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def build(**llm: Any) -> SmallModule:
    """Grouped-query attention, rotary positions, query/key norms, tied head; tensor sizes 1, 2, 3 and 4 divide it."""
    torch.manual_seed(0)
    return SmallModule(
        vision=VisionConfig(image_size=8, patch_size=2, width=24, depth=2, heads=12, tokens_per_image=TOKENS_PER_IMAGE),
        llm=DecoderConfig(vocab_size=48, width=48, depth=2, heads=24, kv_heads=12, mlp_width=48, **llm),
    ).double()


def samples(count: int, seed: int = 0, images: tuple[int, int] = (1, 3)) -> list[dict[str, Tensor]]:
    """Samples with different images, numbers of images, questions and answers of 1 to 3 tokens."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        n = int(torch.randint(images[0], images[1] + 1, (), generator=generator))
        answer = int(torch.randint(1, 4, (), generator=generator))
        prompt = [PLACEHOLDER] * (n * TOKENS_PER_IMAGE) + torch.randint(4, 48, (4,), generator=generator).tolist()
        tokens = prompt + torch.randint(4, 48, (answer,), generator=generator).tolist()
        result.append(
            {
                "input_ids": torch.tensor(tokens + [0] * (SEQUENCE - len(tokens))),
                "labels": torch.tensor(
                    [-100] * len(prompt) + tokens[len(prompt) :] + [-100] * (SEQUENCE - len(tokens))
                ),
                "images": torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64),
            }
        )
    return result


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    input_ids = torch.stack([sample["input_ids"] for sample in batch])
    return {
        "input_ids": input_ids,
        "labels": torch.stack([sample["labels"] for sample in batch]),
        "feature_mask": input_ids == PLACEHOLDER,
        "images": torch.cat([sample["images"] for sample in batch]),
    }
