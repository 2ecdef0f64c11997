"""The reference vision-language model: an image encoder whose rows a decoder reads among its tokens."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_hetero.gradients import token_mean
from lightning_hetero.models.decoder import Decoder, DecoderConfig
from lightning_hetero.models.vit import VisionConfig, VisionEncoder

IGNORE_INDEX = -100
"""The label of a token that is not to be predicted."""


class VisionLanguageModule(LightningModule):
    """Answers questions about images; `vision` encodes the images, `llm` reads their rows among the question's tokens.

    Nothing in here knows about layouts: it trains under any strategy.

    A batch is a dict with

    - `input_ids`: [B, S] int64, prompt, answer and end-of-sequence token, padded at the right;
    - `labels`: [B, S] int64, `input_ids` on the answer and the end-of-sequence token, -100 elsewhere;
    - `prompt_lengths`: [B] int64, the position of the answer's first token;
    - `feature_mask`: [B, S] bool, True at the tokens whose places image rows take;
    - `images`: [N, C, H, W] floats, the images of all samples in order; N may be zero;
    - `is_image_question`: [B] bool; `sample_ids`: [B] int64.

    Args:
        vision: sizes of the encoder.
        llm: sizes of the decoder.
        learning_rate: the highest learning rate.
        weight_decay: AdamW's weight decay.
        beta2: AdamW's decay of the squared gradients' average.
        warmup_steps: steps over which the learning rate rises linearly.
        max_steps: step at which the cosine has fallen to zero; None means the trainer's last step.
        eos_token_id: token that ends an answer.
        max_new_tokens: tokens that `predict_step` generates per sample.
        shuffle_images_in_validation: a control: permutes the images of each validation batch, so that the accuracy on
            image questions falls to chance if the answers really come from the images.
    """

    def __init__(
        self,
        vision: VisionConfig = VisionConfig(),  # noqa: B008 (frozen)
        llm: DecoderConfig = DecoderConfig(),  # noqa: B008 (frozen)
        learning_rate: float = 4e-3,
        weight_decay: float = 0.1,
        beta2: float = 0.99,
        warmup_steps: int = 50,
        max_steps: int | None = None,
        eos_token_id: int = 1,
        max_new_tokens: int = 3,
        shuffle_images_in_validation: bool = False,
    ) -> None:
        super().__init__()
        # A checkpoint's hyper-parameters are plain types (it is read with `weights_only`), so they come back as dicts.
        vision = VisionConfig(**vision) if isinstance(vision, dict) else vision
        llm = DecoderConfig(**llm) if isinstance(llm, dict) else llm
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.beta2 = beta2
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.eos_token_id = eos_token_id
        self.max_new_tokens = max_new_tokens
        self.shuffle_images_in_validation = shuffle_images_in_validation
        self.save_hyperparameters(ignore=["vision", "llm"])
        self.save_hyperparameters({"vision": asdict(vision), "llm": asdict(llm)})

        self.vision = VisionEncoder(**asdict(vision), output_width=llm.width)
        self.llm = Decoder(**asdict(llm))

        self.val_loss = MeanMetric()
        self.val_exact_match = MeanMetric()
        self.val_exact_match_image = MeanMetric()
        self.val_exact_match_text = MeanMetric()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the logits [B, S, vocab_size] of a batch."""
        features = self.vision(batch["images"])
        return self.llm(batch["input_ids"], features, batch["feature_mask"])

    def split_batch(self, batch: dict[str, Tensor], n: int) -> list[dict[str, Tensor]]:
        """Cuts a batch into `n` microbatches of whole samples, with the images of each."""
        images = (batch["feature_mask"].sum(dim=1) // self.vision.tokens_per_image).cpu()
        parts: list[dict[str, Tensor]] = [{} for _ in range(n)]
        for name, tensor in batch.items():
            if name == "images":
                chunks = tensor.split([int(part.sum()) for part in images.tensor_split(n)])
            else:
                chunks = tensor.tensor_split(n)
            for part, chunk in zip(parts, chunks, strict=True):
                part[name] = chunk
        return parts

    def count_tokens(self, batch: dict[str, Tensor]) -> int:
        """Number of tokens that the loss of a batch is summed over."""
        return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss_sum = F.cross_entropy(
            self(batch)[:, :-1].flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        loss = token_mean(self, loss_sum, (batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        # The mean over the replicas of what token_mean returns is the mean over all tokens of the step.
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.shuffle_images_in_validation:
            order = torch.randperm(len(batch["images"]), generator=torch.Generator().manual_seed(batch_idx))
            batch = batch | {"images": batch["images"][order.to(batch["images"].device)]}
        logits, targets = self(batch)[:, :-1], batch["labels"][:, 1:]
        is_answer = targets != IGNORE_INDEX

        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        # Greedy decoding gives exactly the target if and only if every target token, end of sequence included, is the
        # most likely one after the targets before it: as long as that holds, both see the same prefix.
        exact_match = ((logits.argmax(-1) == targets) | ~is_answer).all(dim=1)
        about_image = batch["is_image_question"]
        for name, metric, values in (
            ("val_loss", self.val_loss, losses[is_answer.flatten()]),
            ("val_exact_match", self.val_exact_match, exact_match),
            ("val_exact_match_image", self.val_exact_match_image, exact_match[about_image]),
            ("val_exact_match_text", self.val_exact_match_text, exact_match[~about_image]),
        ):
            if len(values):
                metric.update(values.float())
            # Logged even without values, because all ranks have to log the same names.
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=name == "val_exact_match")

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Answers greedily.

        Returns:
            `sample_ids` [B], and `tokens` [B, max_new_tokens]: the answers, filled with the end-of-sequence token.
        """
        features = self.vision(batch["images"])
        # Each new token is written behind its sample's prompt, over the batch's answer or padding, which the causal
        # attention has not let the prompt see. The number of passes is fixed, so that all ranks make the same calls.
        input_ids = F.pad(batch["input_ids"], (0, self.max_new_tokens), value=self.eos_token_id)
        feature_mask = F.pad(batch["feature_mask"], (0, self.max_new_tokens), value=False)
        samples = torch.arange(len(input_ids), device=input_ids.device)
        done = torch.zeros_like(samples, dtype=torch.bool)
        answers = []
        for position in batch["prompt_lengths"] + torch.arange(self.max_new_tokens, device=input_ids.device)[:, None]:
            logits = self.llm(input_ids, features, feature_mask)
            token = logits[samples, position - 1].argmax(-1).where(~done, self.eos_token_id)
            done = done | (token == self.eos_token_id)
            input_ids = input_ids.index_put((samples, position), token)
            answers.append(token)
        return {"sample_ids": batch["sample_ids"], "tokens": torch.stack(answers, dim=1)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up and a cosine to zero, stepped every step."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, self.beta2), weight_decay=self.weight_decay
        )
        last_step = self.max_steps if self.max_steps is not None else self.trainer.estimated_stepping_batches

        def scale(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            progress = (step - self.warmup_steps) / max(1, last_step - self.warmup_steps)
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
