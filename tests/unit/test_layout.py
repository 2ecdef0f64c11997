"""Layouts: sizes, ranks, the driver, and an error for everything that cannot be placed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import LayoutError
from lightning_hetero.layout import (
    MESH_AXES,
    ModuleLayout,
    axes_text,
    parse_ranks,
    process_groups,
    resolve_layout,
    resolve_layouts,
    show,
)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(None, None), ("0-3", (0, 1, 2, 3)), ("0-1,8-9", (0, 1, 8, 9)), (5, (5,)), ([2, 0], (2, 0)), (" 1 , 3 ", (1, 3))],
)
def test_ranks_are_read(ranks: object, expected: object) -> None:
    assert parse_ranks(ranks) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", ["", "a", "3-1", "1-", [], [0, 0], "0-2,1", [-1], True, 1.5, [True]])
def test_ranks_that_cannot_be_read(ranks: object) -> None:
    with pytest.raises(LayoutError, match="ranks"):
        ModuleLayout(ranks=ranks)  # type: ignore[arg-type]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_as_text_and_back(ranks: set[int]) -> None:
    assert parse_ranks(show(sorted(ranks))) == tuple(sorted(ranks))


def test_rank_order_is_pipeline_replicate_shard_context_tensor() -> None:
    layout = resolve_layout(
        "llm",
        ModuleLayout(
            pipeline_parallel_size=2,
            data_parallel_size=4,
            shard_size=2,
            context_parallel_size=2,
            tensor_parallel_size=2,
        ),
        32,
    )
    assert dict(zip(MESH_AXES, layout.sizes, strict=True)) == dict.fromkeys(MESH_AXES, 2)
    assert [layout.coordinate(rank) for rank in (0, 1, 2, 4, 8, 16)] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 0),
        (0, 0, 1, 0, 0),
        (0, 1, 0, 0, 0),
        (1, 0, 0, 0, 0),
    ]
    # A replica is all of its pipeline, context and tensor ranks.
    assert layout.replicas[0] == (0, 1, 2, 3, 16, 17, 18, 19)
    assert layout.groups(["tensor_parallel"])[:2] == [(0, 1), (2, 3)]
    assert axes_text(layout) == "pipeline 2 x data 4 (shard 2) x context 2 x tensor 2"


def test_groups_are_shared_ordered_and_never_of_one_rank() -> None:
    layouts = resolve_layouts({"vision": ModuleLayout(), "llm": ModuleLayout(tensor_parallel_size=2)}, None, 4)
    # vision's data axis is the world; llm has two data groups and two tensor groups.
    assert process_groups(layouts) == [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1), (2, 3)]
    assert process_groups(resolve_layouts({"llm": ModuleLayout()}, None, 1)) == []


@pytest.mark.parametrize(
    ("layout", "world", "text"),
    [
        (
            ModuleLayout(data_parallel_size=3, tensor_parallel_size=2),
            4,
            "data 3 x context 1 x tensor 2 = 6, but the module has 4 ranks; change layouts.llm.data_parallel_size",
        ),
        (ModuleLayout(tensor_parallel_size=3), 4, "= 3 does not divide the module's 4 ranks; change layouts.llm"),
        (
            ModuleLayout(ranks="2-5"),
            4,
            "ranks 4-5 outside the world of 4 processes (ranks 0-3); change layouts.llm.ranks",
        ),
        (ModuleLayout(shard_size=3), 4, "layouts.llm.shard_size: 3 does not divide the data-parallel size 4"),
    ],
)
def test_sizes_that_do_not_fit(layout: ModuleLayout, world: int, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        resolve_layouts({"llm": layout}, None, world)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "field", ["tensor_parallel_size", "data_parallel_size", "shard_size", "pipeline_parallel_size"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True])
def test_sizes_that_are_no_sizes(field: str, value: object) -> None:
    with pytest.raises(LayoutError, match=f"{field} must be a whole number from 1 up, got") as error:
        ModuleLayout(**{field: value})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)  # a command line shows it inside a traceback of unions


def test_the_driver_is_found_by_name() -> None:
    for name in ("llm", "language_model", "text_model"):
        assert resolve_layouts({"vision": ModuleLayout(), name: ModuleLayout()}, None, 1).driver_name == name
    assert resolve_layouts({"net": ModuleLayout()}, None, 1).driver_name == "net"
    assert resolve_layouts({"a": ModuleLayout(), "b": ModuleLayout()}, "b", 1).driver_name == "b"


def test_a_driver_that_cannot_be_decided() -> None:
    with pytest.raises(LayoutError) as error:
        resolve_layouts({"a": ModuleLayout(), "b": ModuleLayout()}, None, 1)
    assert "driver: cannot be decided" in str(error.value)
    assert "set HeteroStrategy(driver=...) to one of 'a' and 'b'" in str(error.value)
    with pytest.raises(LayoutError, match="driver: 'c' has no layout; choose one of 'a' and 'b'"):
        resolve_layouts({"a": ModuleLayout(), "b": ModuleLayout()}, "c", 1)
    with pytest.raises(LayoutError, match="several layouts are called like a language model"):
        resolve_layouts({"llm": ModuleLayout(), "text_model": ModuleLayout()}, None, 1)


def test_rank_zero_belongs_to_the_driver() -> None:
    with pytest.raises(LayoutError) as error:
        resolve_layouts({"vision": ModuleLayout(ranks="0-1"), "llm": ModuleLayout(ranks="2-3")}, None, 4)
    assert "rank 0 must be one of the driver's ranks, got 2-3" in str(error.value)
    assert "layouts.llm.ranks='0-1'" in str(error.value)


def test_only_the_driver_contains_placed_modules() -> None:
    nested = {"tower": ModuleLayout(module="model.tower"), "llm": ModuleLayout(module="model")}
    assert resolve_layouts(nested, None, 1).owner_of("model.tower.weight").name == "tower"  # type: ignore[union-attr]
    assert resolve_layouts(nested, None, 1).owner_of("model.towers.weight").name == "llm"  # type: ignore[union-attr]
    assert resolve_layouts(nested, None, 1).owner_of("head.weight") is None
    with pytest.raises(LayoutError) as error:
        resolve_layouts(nested, "tower", 1)
    assert "module 'model.tower' lies inside 'model' (layouts.llm), which is not the driver" in str(error.value)
    with pytest.raises(LayoutError, match="place the same module 'x'"):
        resolve_layouts({"a": ModuleLayout(module="x"), "x": ModuleLayout()}, "x", 1)
