"""Item specs: what a call's items are, and that cutting and joining again changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.boundary.specs import (
    CallItems,
    Dim0Items,
    ItemSpec,
    PackedPatches,
    PaddedAudio,
    TensorCut,
    find_spec,
    pad_to,
    resize,
)
from lightning_hetero.errors import BoundaryError
from lightning_hetero.models.audio import AudioEncoder, valid_rows
from lightning_hetero.models.vit import VisionEncoder


def tensors(*call: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]


def rejoin(items: CallItems, call: list[Tensor], cuts: list[int]) -> list[Tensor]:
    """Cuts a call at some items and concatenates the parts again."""
    bounds = [0, *sorted(cuts), len(items.sizes)]
    parts = [items.take(call, start, stop) for start, stop in pairwise(bounds)]
    assert sum((part.sizes for part, _ in parts), ()) == items.sizes
    return [
        whole if cut is None else torch.cat([part[k] for _, part in parts])
        for k, (whole, cut) in enumerate(zip(call, items.cuts, strict=True))
    ]


def packed(grid: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    total = sum(t * h * w for t, h, w in grid)
    return torch.arange(total * 2.0).view(total, 2), torch.tensor(grid, dtype=torch.int64).view(-1, 3)


grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda h: 2 * h), st.just(2)), max_size=6)


@settings(max_examples=100, deadline=None)
@given(grids, st.data())
def test_packed_patches_cut_and_joined_again(grid: list[tuple[int, int, int]], data: st.DataObject) -> None:
    pixel_values, grid_thw = packed(grid)
    kwargs = {"pixel_values": pixel_values, "grid_thw": grid_thw, "scale": torch.tensor(2.0), "flag": True}
    items = PackedPatches().items("visual", (), kwargs)
    assert items.sizes == tuple(t * h * w for t, h, w in grid)
    assert items.cuts == (TensorCut(packed=True), TensorCut(), None)
    cuts = data.draw(st.lists(st.integers(0, len(grid)), max_size=3))
    for joined, whole in zip(rejoin(items, tensors(kwargs), cuts), tensors(kwargs), strict=True):
        assert torch.equal(joined, whole)
    # An item taken alone is a call of its own.
    for i, (t, h, w) in enumerate(grid):
        _, (patches, own_grid, _) = items.take(tensors(kwargs), i, i + 1)
        assert own_grid.tolist() == [[t, h, w]]
        assert PackedPatches().items("visual", (patches, own_grid), {}).sizes == (t * h * w,)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6), st.lists(st.integers(0, 6), max_size=3))
def test_dim_0_cut_and_joined_again(count: int, cuts: list[int]) -> None:
    args = (torch.arange(count * 6.0).view(count, 2, 3), [torch.arange(count)])
    items = Dim0Items().items("vision", args, {"scale": 3})
    assert items == CallItems((1,) * count, (TensorCut(), TensorCut()))
    for joined, whole in zip(rejoin(items, tensors(args), [min(c, count) for c in cuts]), tensors(args), strict=True):
        assert torch.equal(joined, whole)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 5), st.lists(st.integers(0, 6), max_size=3))
def test_padded_audio_cut_and_joined_again(lengths: list[int], extra: int, cuts: list[int]) -> None:
    count, frames = len(lengths), max(lengths) + extra + 1
    mask = torch.arange(frames) < torch.tensor(lengths)[:, None]
    features = torch.arange(count * 2.0 * frames).view(count, 2, frames) * mask[:, None]
    kwargs = {"features": features, "lengths": torch.tensor(lengths), "mask": mask}
    items = PaddedAudio(masks=("mask",)).items("audio", (), kwargs)
    assert items.sizes == tuple(lengths)
    assert items.cuts == (TensorCut(pad=2), TensorCut(), TensorCut(pad=1))
    call = tensors(kwargs)
    for joined, whole in zip(rejoin(items, call, [min(c, count) for c in cuts]), call, strict=True):
        assert torch.equal(joined, whole)
    # To the longest and back to the given length: only padding is lost and found.
    short = resize(call, items.cuts, items.sizes)
    longest = max(1, max(lengths))
    assert [tuple(t.shape) for t in short] == [(count, 2, longest), (count,), (count, longest)]
    for found, whole in zip(resize(short, items.cuts, [frames]), call, strict=True):
        assert torch.equal(found, whole)


def test_ranks_that_padded_differently_give_what_one_process_gives() -> None:
    """The way of a call: two ranks' clips in one form, cut anew, each share shortened, encoded, results joined."""
    torch.manual_seed(0)
    model, spec = AudioEncoder(output_width=8, mels=4, width=16, heads=2).double(), AudioEncoder.item_spec
    first, second = torch.randn(3, 4, 9, dtype=torch.float64), torch.randn(2, 4, 21, dtype=torch.float64)
    calls = [(first, torch.tensor([9, 3, 5])), (second, torch.tensor([18, 2]))]
    items = [spec.items("audio", call, {}) for call in calls]
    assert items[0].cuts == items[1].cuts
    for call in calls:
        forms = [cut.form(tensor.shape) for cut, tensor in zip(items[0].cuts, call, strict=True) if cut]
        assert forms == [(4, None), ()], "ranks agree on all but the padded dim"
    sizes = items[0].sizes + items[1].sizes
    common = [torch.cat(pair) for pair in zip(*(resize(c, items[0].cuts, sizes) for c in calls), strict=True)]
    assert common[0].shape == (5, 4, 18)
    everything = CallItems(sizes, items[0].cuts)
    results = []
    for start, stop in [(0, 3), (3, 5)]:
        share, own = everything.take(common, start, stop)
        rows, row_lengths = model(*resize(own, share.cuts, share.sizes))
        assert rows.shape[1] == (max(share.sizes) + 1) // 2
        assert spec.result_scale("audio", "result[0]", rows.shape, share.sizes) == 1
        assert spec.result_pad == 1
        results.append((pad_to(rows, 1, 9), row_lengths))
    rows, row_lengths = (torch.cat(part) for part in zip(*results, strict=True))
    expected = [valid_rows(*model(*call)) for call in calls]
    torch.testing.assert_close(valid_rows(rows, row_lengths), torch.cat(expected), rtol=0, atol=1e-12)


def test_arguments_by_keyword_or_position() -> None:
    pixel_values, grid_thw = packed([(1, 2, 2), (1, 2, 4)])
    spec = PackedPatches()
    for args, kwargs in [
        ((pixel_values, grid_thw), {}),
        ((pixel_values,), {"grid_thw": grid_thw}),
        ((), {"pixel_values": pixel_values, "grid_thw": grid_thw}),
    ]:
        assert spec.items("visual", args, kwargs).cuts == (TensorCut(packed=True), TensorCut())
    swapped = spec.items("visual", (), {"grid_thw": grid_thw, "pixel_values": pixel_values})
    assert swapped.cuts == (TensorCut(), TensorCut(packed=True))
    renamed = PackedPatches("hidden_states", grid="sizes", merge=1)
    assert renamed.items("visual", (), {"hidden_states": pixel_values, "sizes": grid_thw}).sizes == (4, 8)


def test_rows_of_results() -> None:
    spec = PackedPatches(merge=2)
    assert spec.result_scale("visual", "result.pooler_output", (6, 5), [16, 8]) == 1
    assert spec.result_scale("visual", "result.last_hidden_state", (24, 5), [16, 8]) == 4
    assert [4 * spec.output_rows(size) for size in [16, 8]] == [16, 8]
    assert Dim0Items().result_scale("vision", "result", (15, 5), [1] * 3) == 5
    assert Dim0Items().result_scale("vision", "result", (3,), [1] * 3) == 1
    for shape in [(2, 5), (12, 5), ()]:
        with pytest.raises(BoundaryError) as error:
            spec.result_scale("visual", "result[1]", shape, [16, 8])
        message = str(error.value)
        assert f"cannot be given back to its items: result[1] has shape {list(shape)}" in message
        assert "expected dim 0 to be 6 (merged rows) or 24 (patches) for its 2 items" in message
    with pytest.raises(BoundaryError, match="expected dim 0 to be a multiple of 3 for its 3 items"):
        Dim0Items().result_scale("vision", "result", (4, 5), [1] * 3)


def test_costs() -> None:
    assert PackedPatches().costs([4, 8]) == [4.0, 8.0]
    assert PackedPatches(quadratic=0.5, linear=2.0).costs([4, 8]) == [16.0, 48.0]
    assert Dim0Items().costs([1, 1]) == [1.0, 1.0]


def test_lengths_that_are_not_on_the_host_are_not_read() -> None:
    features, lengths = torch.zeros(2, 4, 9), torch.zeros(2, dtype=torch.int64, device="meta")
    assert PaddedAudio().items("audio", (features, lengths), {}).sizes == (9, 9)
    assert PaddedAudio(lengths=None, dim=1).items("audio", (features,), {}).sizes == (4, 4)


PATCHES, GRID = packed([(1, 2, 2), (1, 2, 4)])
CLIPS, LENGTHS = torch.zeros(2, 4, 9), torch.tensor([9, 3])


@pytest.mark.parametrize(
    ("spec", "args", "kwargs", "said"),
    [
        (Dim0Items(), (), {"a": 1}, "was called without a tensor to cut into items"),
        (
            Dim0Items(),
            (torch.zeros(2), torch.zeros(1, 3)),
            {},
            "different numbers of items: argument [0] has 2, argument [1] has 1 along dim 0 (shape [1, 3])",
        ),
        (
            PackedPatches(),
            (PATCHES,),
            {"grid": GRID},
            "called without 'grid_thw' (or a positional argument [1] in its place), which its item spec names; it got "
            "1 positional arguments and the keywords ['grid']",
        ),
        (PackedPatches(), (PATCHES, [[1, 2, 2]]), {}, "argument [1] must be a tensor, got list"),
        (PackedPatches(), (PATCHES,), {"grid_thw": GRID[:, :2]}, "keyword argument ['grid_thw'] must hold (frames,"),
        (PackedPatches(), (PATCHES, GRID.float()), {}, "got shape [2, 3] of torch.float32"),
        (PackedPatches(merge=4), (PATCHES, GRID), {}, "the item (1, 2, 2), whose rows and columns must be multiples"),
        (PackedPatches(), (PATCHES[1:], GRID), {}, "[0] must have as many rows as argument [1] has patches, 12"),
        (
            PackedPatches(),
            (PATCHES, GRID),
            {"times": torch.zeros(3)},
            "argument [1] has 2, keyword argument ['times'] has 3 along dim 0",
        ),
        (PaddedAudio(), (torch.zeros(2), LENGTHS), {}, "[0] must have items along dim 0 and frames along dim -1"),
        (PaddedAudio(dim=0), (CLIPS, LENGTHS), {}, "frames along dim 0 (PaddedAudio(dim=...))"),
        (
            PaddedAudio(),
            (CLIPS,),
            {"lengths": LENGTHS[:1]},
            "must hold one integer for each of the 2 items",
        ),
        (PaddedAudio(), (CLIPS, LENGTHS + 1), {}, "argument [1] must be from 0 to the 9 frames that argument [0] has"),
        (PaddedAudio(masks=("m",)), (CLIPS, LENGTHS), {}, "called without 'm', which its item spec names"),
        (
            PaddedAudio(masks=("m",)),
            (CLIPS, LENGTHS),
            {"m": torch.zeros(2, 8)},
            "keyword argument ['m'] must have the 9 frames of argument [0] along its last dim, got shape [2, 8]",
        ),
    ],
)
def test_errors_name_the_argument(spec: ItemSpec, args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(BoundaryError) as error:
        spec.items("tower", args, kwargs)
    assert "'tower'" in str(error.value)
    assert said in str(error.value)


def test_which_spec_a_module_has() -> None:
    class Wide(VisionEncoder):
        pass

    class Model(nn.Module):
        def __init__(self, specs: dict[Any, Any]) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({"a": Wide(output_width=8), "b": VisionEncoder(output_width=8)})
            self.audio = AudioEncoder(output_width=8)
            self.specs = specs

        def item_specs(self) -> dict[Any, Any]:
            return self.specs

    by_class, by_path, by_name = PackedPatches(merge=1), PackedPatches(merge=2), PackedPatches(merge=3)
    model = Model({VisionEncoder: by_class})
    wide, plain = model.towers["a"], model.towers["b"]
    assert find_spec(wide, "vision", model) is by_class, "a base class counts"
    assert find_spec(model.audio, "audio", model) is AudioEncoder.item_spec, "its own attribute"
    model.specs |= {Wide: by_path}
    assert find_spec(wide, "vision", model) is by_path, "the most derived class first"
    model.specs |= {"towers.a": by_name}
    assert find_spec(wide, "vision", model) is by_name, "a path before a class"
    model.specs |= {"vision": by_class, AudioEncoder: by_path}
    assert find_spec(wide, "vision", model) is by_class, "the layout's name before all"
    assert find_spec(plain, "other", model) is by_class
    assert find_spec(model.audio, "audio", model) is by_path, "the hook before the attribute"
    assert find_spec(nn.Linear(2, 2), "x", nn.Module()) == Dim0Items()
    model.specs = {"audio": "padded"}
    with pytest.raises(BoundaryError, match=r"item_specs\(\)\['audio'\] must be an ItemSpec .*, got 'padded'"):
        find_spec(model.audio, "audio", model)


def test_a_spec_of_ones_own() -> None:
    @dataclass(frozen=True)
    class Resampled(ItemSpec):
        """Ragged patches with a list of counts beside them; every item becomes 16 rows."""

        def items(self, name: str, args: Any, kwargs: Any) -> CallItems:
            return CallItems(tuple(kwargs["counts"]), (TensorCut(packed=True),))

    spec = Resampled(quadratic=1.0)
    items = spec.items("vision", (torch.zeros(7, 3),), {"counts": [3, 4]})
    assert spec.result_scale("vision", "result", (32, 8), items.sizes) == 16
    assert items.take([torch.arange(7)], 1, 2)[1][0].tolist() == [3, 4, 5, 6]
    assert spec.costs(items.sizes) == [12.0, 20.0]
