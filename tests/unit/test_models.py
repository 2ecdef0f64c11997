"""The reference models: shapes, numerics against plain references, and what the strategy reads from them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.datasets.digits import DigitsDataModule
from lightning_hetero.models import Decoder, DecoderConfig, VisionConfig, VisionEncoder, VisionLanguageModule
from lightning_hetero.models.decoder import Attention, apply_rope, merge_features, rope_tables

TINY_VISION = VisionConfig(patch_size=4, width=16, depth=1, heads=2, tokens_per_image=1)
TINY_LLM = DecoderConfig(vocab_size=48, width=16, depth=1, heads=2, kv_heads=1, mlp_width=16)


def digits_batch(batch_size: int = 8, text_share: float = 0.3) -> dict[str, Tensor]:
    data = DigitsDataModule(batch_size=batch_size, train_samples=64, val_samples=64, text_share=text_share)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def tiny_module(**kwargs: object) -> VisionLanguageModule:
    torch.manual_seed(0)
    return VisionLanguageModule(vision=TINY_VISION, llm=TINY_LLM, **kwargs)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class TestVisionEncoder:
    @pytest.mark.parametrize("items", [0, 1, 3])
    @pytest.mark.parametrize(("tokens_per_image", "rows"), [(None, 16), (4, 4), (1, 1)])
    def test_shape(self, items: int, tokens_per_image: int | None, rows: int) -> None:
        encoder = VisionEncoder(output_width=24, depth=1, tokens_per_image=tokens_per_image)
        out = encoder(torch.randn(items, 1, 8, 8))
        assert out.shape == (items, rows, 24)
        assert encoder.tokens_per_image == rows
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in encoder.parameters())

    def test_patches_are_those_of_a_convolution(self) -> None:
        encoder = VisionEncoder(output_width=8, in_channels=3, width=8, heads=2, depth=0).double()
        encoder.norm, encoder.projector = nn.Identity(), nn.Identity()
        images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        kernel = encoder.patch_embed.weight.view(8, 3, 2, 2)
        expected = F.conv2d(images, kernel, encoder.patch_embed.bias, stride=2).flatten(2).transpose(1, 2)
        torch.testing.assert_close(encoder(images), expected + encoder.position_embed, rtol=1e-12, atol=1e-12)

    def test_pooling_averages_squares_of_the_patch_grid(self) -> None:
        encoder = VisionEncoder(output_width=8, width=8, heads=2, depth=1, tokens_per_image=4)
        encoder.projector = nn.Identity()
        images = torch.randn(2, 1, 8, 8)
        pooled = encoder(images)
        encoder.pool = 1
        grid = encoder(images).view(2, 4, 4, 8)
        torch.testing.assert_close(pooled[:, 1], grid[:, :2, 2:].mean(dim=(1, 2)))

    @pytest.mark.parametrize(
        "sizes", [{"patch_size": 3}, {"heads": 5}, {"tokens_per_image": 2}, {"tokens_per_image": 9}]
    )
    def test_sizes_that_do_not_fit(self, sizes: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=next(iter(sizes))):
            VisionEncoder(output_width=8, **sizes)


class TestDecoder:
    def test_rope_rotates_by_position_times_frequency(self) -> None:
        x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
        cos, sin = rope_tables(5, 8, 10000.0, x.device, x.dtype)
        rotated = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1))
        frequencies = torch.tensor([10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
        rotated = rotated * torch.polar(torch.ones(5, 4, dtype=torch.float64), torch.arange(5)[:, None] * frequencies)
        expected = torch.cat((rotated.real, rotated.imag), dim=-1)
        torch.testing.assert_close(apply_rope(x, cos, sin), expected, rtol=1e-12, atol=1e-12)

    def test_rope_in_low_precision_has_accurate_angles(self) -> None:
        low = rope_tables(4096, 8, 10000.0, torch.device("cpu"), torch.bfloat16)
        high = rope_tables(4096, 8, 10000.0, torch.device("cpu"), torch.float64)
        assert all((a - b).abs().max() < 5e-3 for a, b in zip(low, high, strict=True))

    def test_attention_is_grouped_causal_softmax(self) -> None:
        attention = Attention(16, heads=4, kv_heads=2, head_dim=8, qk_norm=True, dropout=0.0).double()
        x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
        cos, sin = rope_tables(6, 8, 10000.0, x.device, x.dtype)

        def heads(proj: nn.Linear) -> Tensor:
            return proj(x).unflatten(-1, (-1, 8)).transpose(1, 2)

        q = apply_rope(attention.q_norm(heads(attention.q_proj)), cos, sin)
        k = apply_rope(attention.k_norm(heads(attention.k_proj)), cos, sin).repeat_interleave(2, dim=1)
        v = heads(attention.v_proj).repeat_interleave(2, dim=1)
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        expected = attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

        actual = attention(x, cos, sin)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(actual)
        for parameter in (x, *attention.parameters()):
            grads = [
                torch.autograd.grad((out * weights).sum(), parameter, retain_graph=True) for out in (actual, expected)
            ]
            torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)

    def test_a_rank_with_some_of_the_heads_runs_the_same_code(self) -> None:
        attention = Attention(16, heads=4, kv_heads=2, head_dim=8, qk_norm=True, dropout=0.0).double()
        x = torch.randn(2, 6, 16, dtype=torch.float64)
        rope = rope_tables(6, 8, 10000.0, x.device, x.dtype)
        whole, parts = attention(x, *rope), torch.zeros_like(x)
        for rank in range(2):
            part = Attention(16, heads=2, kv_heads=1, head_dim=8, qk_norm=True, dropout=0.0).double()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = getattr(attention, name).weight.chunk(2, dim=1 if name == "o_proj" else 0)[rank]
                getattr(part, name).weight = nn.Parameter(weight)
            parts += part(x, *rope)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)

    def test_is_causal(self) -> None:
        decoder = Decoder(vocab_size=32).double()
        ids = torch.randint(32, (2, 9))
        changed = ids.clone()
        changed[:, 5:] = 0
        torch.testing.assert_close(decoder(ids)[:, :5], decoder(changed)[:, :5], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("qk_norm", [True, False])
    @pytest.mark.parametrize("tie", [True, False])
    def test_every_parameter_gets_a_gradient(self, qk_norm: bool, tie: bool) -> None:
        decoder = Decoder(vocab_size=32, heads=8, kv_heads=4, qk_norm=qk_norm, tie_embeddings=tie)
        decoder(torch.randint(32, (2, 5))).square().sum().backward()
        assert all(parameter.grad is not None for parameter in decoder.parameters())
        assert (decoder.head.weight is decoder.embed.weight) == tie

    def test_tie_again_after_the_embedding_was_replaced(self) -> None:
        decoder = Decoder()
        decoder.embed = nn.Embedding(64, 64)
        decoder.tie_weights()
        assert decoder.head.weight is decoder.embed.weight

    @pytest.mark.parametrize(
        ("sizes", "text"),
        [({"kv_heads": 3}, "kv_heads=3"), ({"width": 66}, "heads=4"), ({"head_dim": 3}, "head_dim=3 is odd")],
    )
    def test_sizes_that_do_not_fit(self, sizes: dict[str, int], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            Decoder(**sizes)


class TestMergeFeatures:
    mask = torch.tensor([[True, True, False, False], [False, False, False, False], [False, True, False, True]])

    def test_rows_take_the_masked_places_in_order(self) -> None:
        x, features = torch.randn(3, 4, 5), torch.randn(2, 2, 5)
        expected = x.clone()
        expected[self.mask] = features.flatten(0, 1)
        before = x.clone()
        assert torch.equal(merge_features(x, features, self.mask), expected)
        assert torch.equal(merge_features(x, features.flatten(0, 1), self.mask), expected)
        assert torch.equal(x, before)

    def test_gradients(self) -> None:
        x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
        features = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda *inputs: merge_features(*inputs, self.mask), (x, features))

    @pytest.mark.parametrize("shape", [(0, 5), (0, 2, 5)])
    def test_no_rows(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(3, 4, 5, requires_grad=True)
        features = torch.zeros(shape, requires_grad=True)
        merged = merge_features(x, features, torch.zeros_like(self.mask))
        merged.sum().backward()
        assert torch.equal(merged, x)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
        assert features.grad is not None
        assert features.grad.shape == shape

    @pytest.mark.parametrize("rows", [3, 5])
    def test_rows_that_do_not_fit_the_mask(self, rows: int) -> None:
        with pytest.raises(ValueError, match=f"feature_mask has 4 positions, but features have {rows} rows"):
            merge_features(torch.randn(3, 4, 5), torch.randn(rows, 5), self.mask)

    def test_width_that_does_not_fit(self) -> None:
        with pytest.raises(ValueError, match="features have width 6, the embeddings have width 5"):
            merge_features(torch.randn(3, 4, 5), torch.randn(4, 6), self.mask)

    def test_features_without_mask(self) -> None:
        with pytest.raises(ValueError, match="given together"):
            Decoder()(torch.zeros(3, 4, dtype=torch.long), torch.randn(4, 64))


def matches(pattern: str, path: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), path) is not None


@pytest.mark.parametrize(
    "model", [VisionEncoder(output_width=16), Decoder(heads=8, kv_heads=4), Decoder(qk_norm=False)]
)
class TestWhatTheStrategyReads:
    def test_plan_names_modules_and_leaves_no_linear_of_a_block_out(self, model: VisionEncoder | Decoder) -> None:
        paths = {path: module for path, module in model.named_modules() if path}
        for pattern in (*model.tensor_parallel_plan, *model.fsdp_units, *model.tensor_parallel_heads):
            assert any(matches(pattern, path) for path in paths), pattern
        for path, module in paths.items():
            if path.startswith("blocks.") and isinstance(module, nn.Linear):
                assert any(matches(pattern, path) for pattern in model.tensor_parallel_plan), path

    def test_heads_are_those_of_the_projection(self, model: VisionEncoder | Decoder) -> None:
        for pattern, heads in model.tensor_parallel_heads.items():
            projection = model.get_submodule(pattern.replace("*", "0"))
            width = projection.in_features if pattern.endswith("o_proj") else projection.out_features
            assert width == heads * model.blocks[0].attn.head_dim

    def test_same_seed_same_weights(self, model: VisionEncoder | Decoder) -> None:
        states = []
        for _ in range(2):
            torch.manual_seed(3)
            model.init_weights()
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_nothing_but_parameters_and_so_nothing_lost_on_meta(self, model: VisionEncoder | Decoder) -> None:
        assert not list(model.buffers())


@pytest.mark.parametrize(("config", "model"), [(VisionConfig, VisionEncoder), (DecoderConfig, Decoder)])
def test_config_and_constructor_agree(config: type, model: type) -> None:
    parameters = inspect.signature(model).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "output_width"}
    assert {field.name: field.default for field in dataclasses.fields(config)} == defaults


class TestVisionLanguageModule:
    def test_loss_is_the_mean_over_the_answer_tokens(self) -> None:
        module, batch = tiny_module(), digits_batch()
        log_probs = module(batch).log_softmax(-1)
        terms = [
            -log_probs[sample, position - 1, label]
            for (sample, position), label in zip(
                (batch["labels"] != -100).nonzero().tolist(), batch["labels"][batch["labels"] != -100], strict=True
            )
        ]
        torch.testing.assert_close(module.training_step(batch, 0), torch.stack(terms).mean())
        assert module.count_tokens(batch) == len(terms)

    def test_batch_without_images(self) -> None:
        module, batch = tiny_module(), digits_batch(text_share=1.0)
        assert batch["images"].shape == (0, 1, 8, 8)
        module.training_step(batch, 0).backward()
        module.validation_step(batch, 0)
        assert module.predict_step(batch, 0)["tokens"].shape == (8, 3)
        assert module.val_exact_match_text.update_called
        assert not module.val_exact_match_image.update_called

    def test_batch_without_text_questions(self) -> None:
        module = tiny_module()
        module.validation_step(digits_batch(text_share=0.0), 0)
        assert module.val_exact_match_image.update_called
        assert not module.val_exact_match_text.update_called

    def test_exact_match_is_that_of_greedy_decoding(self) -> None:
        # Trained a little on one batch, so that some answers are right and others are not.
        module, batch = tiny_module(), digits_batch(batch_size=32)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
        module.eval()
        module.validation_step(batch, 0)
        tokens = module.predict_step(batch, 0)["tokens"].tolist()
        targets = [[label for label in row if label != -100] for row in batch["labels"].tolist()]
        hits = [answer[: len(target)] == target for answer, target in zip(tokens, targets, strict=True)]
        assert 0 < sum(hits) < len(hits)
        assert module.val_exact_match.compute().item() == pytest.approx(sum(hits) / len(hits))

    def test_prediction_does_not_see_the_answer(self) -> None:
        module, batch = tiny_module(), digits_batch()
        hidden = batch | {"input_ids": torch.where(batch["labels"] == -100, batch["input_ids"], 5)}
        assert torch.equal(module.predict_step(batch, 0)["tokens"], module.predict_step(hidden, 0)["tokens"])

    def test_shuffled_images_change_only_image_questions(self) -> None:
        module, control = tiny_module(), tiny_module(shuffle_images_in_validation=True)
        losses = []
        for text_share in (0.0, 1.0):
            for current in (module, control):
                current.val_loss.reset()
                current.validation_step(digits_batch(text_share=text_share), 0)
                losses.append(current.val_loss.compute().item())
        assert losses[0] != losses[1]
        assert losses[2] == losses[3]

    def test_learning_rate_rises_and_falls_to_zero(self) -> None:
        module = tiny_module(learning_rate=0.1, warmup_steps=4, max_steps=20)
        config = module.configure_optimizers()
        rates = []
        for _ in range(21):
            rates.append(config["optimizer"].param_groups[0]["lr"])
            config["optimizer"].step()
            config["lr_scheduler"]["scheduler"].step()
        assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
        assert rates[12] == pytest.approx(0.05)
        assert rates[20] == pytest.approx(0.0)
        assert sorted(rates[4:], reverse=True) == rates[4:]

    def test_configuration_from_plain_types(self) -> None:
        parser = ArgumentParser()
        parser.add_class_arguments(VisionLanguageModule, "model")
        config = parser.parse_object(
            {"model": {"vision": {"width": 32, "tokens_per_image": 1}, "llm": {"heads": 8, "kv_heads": 4}}}
        )
        module = parser.instantiate_classes(config).model
        assert module.vision.patch_embed.out_features == 32
        assert (module.llm.heads, module.llm.kv_heads) == (8, 4)

    def test_fit_validate_and_load_the_checkpoint(self, tmp_path: Path) -> None:
        module = tiny_module(max_steps=4)
        data = DigitsDataModule(batch_size=8, train_samples=32, val_samples=20)
        trainer = Trainer(
            max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, data)
        names = {"val_loss", "val_exact_match", "val_exact_match_image", "val_exact_match_text"}
        assert names < set(trainer.callback_metrics)
        loaded = VisionLanguageModule.load_from_checkpoint(next(tmp_path.rglob("*.ckpt")), weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))
        assert sum(len(out["sample_ids"]) for out in trainer.predict(loaded, data)) == 20
