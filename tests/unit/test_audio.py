"""The reference audio encoder: lengths respected exactly, and its plan."""

from __future__ import annotations

from math import cos, sin

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.boundary.specs import PaddedAudio, find_spec
from lightning_hetero.layout import ModuleLayout, resolve_layout
from lightning_hetero.models.audio import AudioConfig, AudioEncoder, sinusoidal_positions, valid_rows
from lightning_hetero.parallelize.data import resolve_units
from lightning_hetero.parallelize.plans import resolve_plan

LENGTHS = [7, 1, 12, 4, 0, 5]


def encoder(**sizes: object) -> AudioEncoder:
    torch.manual_seed(0)
    return AudioEncoder(output_width=10, **{"mels": 6, "width": 16, "heads": 2, **sizes}).double()  # type: ignore[arg-type]


def clips(lengths: list[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, length, generator=generator, dtype=torch.float64) for length in lengths]


def padded(items: list[Tensor], frames: int, fill: float = 0.0) -> Tensor:
    return torch.stack([F.pad(item, (0, frames - item.shape[1]), value=fill) for item in items])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]


def test_shapes() -> None:
    rows, row_lengths = encoder()(padded(clips(), 12), torch.tensor(LENGTHS))
    assert rows.shape == (6, 6, 10)
    assert row_lengths.tolist() == [4, 1, 6, 2, 0, 3]
    for row, length in zip(rows, row_lengths.tolist(), strict=True):
        assert not row[length:].any() and row[:length].any(dim=-1).all()
    assert valid_rows(rows, row_lengths).shape == (16, 10)
    assert torch.equal(valid_rows(rows, row_lengths)[4:5], rows[1, :1])


@pytest.mark.parametrize("fill", [0.0, 1e3, float("nan")])
@pytest.mark.parametrize("frames", [12, 13, 40])
def test_padding_changes_neither_rows_nor_gradients(frames: int, fill: float) -> None:
    model, lengths = encoder(), torch.tensor(LENGTHS)
    rows, row_lengths = model(padded(clips(), 12), lengths)
    other, other_lengths = model(padded(clips(), frames, fill), lengths)
    assert torch.equal(row_lengths, other_lengths)
    expected, found = valid_rows(rows, row_lengths), valid_rows(other, other_lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    wanted = gradients(model, (expected * weights).sum())
    for name, gradient in gradients(model, (found * weights).sum()).items():
        assert (gradient - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name


def test_a_clip_does_not_depend_on_the_others() -> None:
    model = encoder()
    rows, row_lengths = model(padded(clips(), 12), torch.tensor(LENGTHS))
    for item, clip in enumerate(clips()):
        if clip.shape[1]:
            alone, length = model(clip[None], torch.tensor([clip.shape[1]]))
            torch.testing.assert_close(alone[0], rows[item, : row_lengths[item]], rtol=0, atol=1e-12)
            assert length.item() == row_lengths[item] == alone.shape[1]


def test_every_valid_frame_counts_and_no_other() -> None:
    features = padded(clips(), 14).requires_grad_()
    rows, _ = encoder()(features, torch.tensor(LENGTHS))
    rows.square().sum().backward()
    assert features.grad is not None and torch.isfinite(features.grad).all()
    for gradient, length in zip(features.grad, LENGTHS, strict=True):
        assert gradient[:, :length].any(dim=0).all() and not gradient[:, length:].any()


def test_every_parameter_gets_a_gradient() -> None:
    model = encoder()
    rows, _ = model(padded(clips(), 12), torch.tensor(LENGTHS))
    loss = (rows * torch.randn_like(rows)).sum()
    assert all(float(gradient.norm()) > 1e-3 for gradient in gradients(model, loss).values())


def test_no_clips() -> None:
    model = encoder()
    rows, row_lengths = model(torch.empty(0, 6, 8, dtype=torch.float64), torch.empty(0, dtype=torch.int64))
    assert rows.shape == (0, 4, 10) and row_lengths.shape == (0,)
    assert not any(gradient.any() for gradient in gradients(model, rows.sum()).values())


def test_clips_without_frames_give_no_rows_and_no_nan() -> None:
    model = encoder()
    rows, row_lengths = model(torch.zeros(2, 6, 3, dtype=torch.float64), torch.tensor([0, 0]))
    assert not rows.any() and not row_lengths.any()
    assert not any(gradient.any() for gradient in gradients(model, rows.sum()).values())


def test_positions() -> None:
    positions = sinusoidal_positions(5, 4, torch.device("cpu"), torch.float64)
    assert positions[0].tolist() == [0, 0, 1, 1]
    assert positions[3].tolist() == pytest.approx([sin(3), sin(0.03), cos(3), cos(0.03)], abs=1e-14)
    long = sinusoidal_positions(9, 4, torch.device("cpu"), torch.float64)
    assert torch.equal(long[:5], positions), "a position does not depend on the length"


def test_plan_units_and_spec() -> None:
    model = encoder(depth=2)
    plan = resolve_plan(model, resolve_layout("audio", ModuleLayout(tensor_parallel_size=2), 2))
    assert plan["blocks.1.attn.o_proj"] == "rowwise" and plan["projector.fc1"] == "colwise"
    assert not any("conv" in path for path in plan)
    assert model.tensor_parallel_heads["blocks.*.attn.k_proj"] == 2
    assert resolve_units(model, resolve_layout("audio", ModuleLayout(), 2)) == ["blocks.0", "blocks.1"]
    assert find_spec(model, "audio", nn.ModuleDict({"audio": model})) == PaddedAudio()


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="heads=3 does not divide width=16"):
        encoder(heads=3)
    with pytest.raises(ValueError, match="width=15 is odd"):
        encoder(width=15, heads=3)
    config = AudioConfig()
    assert config.width % config.heads == 0


def test_dropout_and_half_precision_run() -> None:
    model = encoder(dropout=0.5).bfloat16().train()
    rows, _ = model(padded(clips(), 12).bfloat16(), torch.tensor(LENGTHS))
    assert rows.dtype == torch.bfloat16 and torch.isfinite(rows).all()
    with torch.device("meta"):
        assert AudioEncoder(output_width=4).conv1.weight.is_meta
