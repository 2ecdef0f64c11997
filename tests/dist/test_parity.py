"""The gradient contract for the reference model under colocated layouts, through Trainer.fit."""

from __future__ import annotations

import re
from itertools import product

import pytest

from lightning_hetero import ModuleLayout
from tests.dist import vlm
from tests.harness import Pool
from tests.harness.parity import Case, Placed, RankReport, Reference, assert_parity, bytes_sent, owners, reference_run

STEPS, GLOBAL_BATCH = 2, 24
BYTES = 8  # float64

# (vision data, tensor | llm data, tensor)
LAYOUTS = [
    ((4, 1), (1, 4)),
    ((4, 1), (2, 2)),
    ((2, 2), (4, 1)),
    ((1, 4), (4, 1)),
    ((2, 2), (2, 2)),
    ((8, 1), (2, 4)),
    ((2, 4), (8, 1)),
    ((4, 2), (2, 4)),
    ((3, 2), (2, 3)),
    ((6, 1), (2, 3)),
    ((2, 3), (6, 1)),
]

# Dims that the tensor axis shards, by the last components of a parameter's name; written down from the models.
TENSOR_DIMS = {
    r"vision.*\.(q|k|v)_proj\.(weight|bias)": 0,
    r"vision.*\.o_proj\.weight": 1,
    r"vision.*\.fc1\.(weight|bias)": 0,
    r"vision.*\.fc2\.weight": 1,
    r"llm.*\.(q|k|v|gate|up)_proj\.weight": 0,
    r"llm.*\.(o|down)_proj\.weight": 1,
    r"llm\.(embed|head)\.weight": 0,
}


def layout_id(layout: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return "-".join(f"{data}x{tensor}" for data, tensor in layout)


def case(vision: tuple[int, int], llm: tuple[int, int], shards: tuple[int | str, int | str], **kwargs: object) -> Case:
    return Case(
        {
            "vision": ModuleLayout(tensor_parallel_size=vision[1], shard_size=shards[0]),  # type: ignore[arg-type]
            "llm": ModuleLayout(tensor_parallel_size=llm[1], shard_size=shards[1]),  # type: ignore[arg-type]
        },
        **kwargs,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def batches() -> list[list[dict]]:
    data = vlm.samples(STEPS * GLOBAL_BATCH)
    return [data[:GLOBAL_BATCH], data[GLOBAL_BATCH:]]


@pytest.fixture(scope="module")
def reference(batches: list[list[dict]]) -> Reference:
    return reference_run(vlm.build, batches, vlm.collate)


@pytest.mark.parametrize(("vision", "llm"), LAYOUTS, ids=map(layout_id, LAYOUTS))
def test_gradients_memory_items_and_bytes(
    pool: Pool,
    batches: list[list[dict]],
    reference: Reference,
    vision: tuple[int, int],
    llm: tuple[int, int],
) -> None:
    world = vision[0] * vision[1]
    cases = [case(vision, llm, shards) for shards in product((1, "full"), repeat=2)]
    for tested, reports in zip(
        cases, assert_parity(pool, world, cases, vlm.build, batches, vlm.collate, reference), strict=True
    ):
        assert_memory(tested, reports, world)
        assert_transfers(tested, reports, batches, world)


HYBRID = [((8, 1), (4, 2), (2, 2)), ((4, 2), (8, 1), (2, 4)), ((8, 1), (2, 4), (4, "full")), ((8, 1), (8, 1), (1, 4))]


def test_hybrid_sharding_on_eight_ranks(pool: Pool, batches: list[list[dict]], reference: Reference) -> None:
    cases = [case(vision, llm, shards) for vision, llm, shards in HYBRID]
    for tested, reports in zip(
        cases, assert_parity(pool, 8, cases, vlm.build, batches, vlm.collate, reference), strict=True
    ):
        assert_memory(tested, reports, 8)
        assert_transfers(tested, reports, batches, 8)


def assert_memory(tested: Case, reports: list[RankReport], world: int) -> None:
    """Parameter and optimizer bytes of every rank are the closed form of the layouts, AdamW's two states included."""
    for rank, report in enumerate(reports):
        for name, shape in report.shapes.items():
            layout = tested.layouts[name.split(".")[0]]
            dim = next((dim for pattern, dim in TENSOR_DIMS.items() if re.fullmatch(pattern, name)), None)
            elements = Placed.of(layout, world).elements(shape, dim, rank)
            assert report.parameter_bytes[name] == elements * BYTES, (rank, name)
            assert report.optimizer_bytes[name] == 2 * elements * BYTES, (rank, name)


def assert_transfers(tested: Case, reports: list[RankReport], batches: list[list[dict]], world: int) -> None:
    """Each rank encodes its share, the shares add up to one process's items, and no byte is sent that need not be."""
    vision, llm = (Placed.of(tested.layouts[name], world) for name in ("vision", "llm"))
    image, feature = 64 * BYTES, vlm.TOKENS_PER_IMAGE * 48 * BYTES
    items, forward, backward = [0] * world, [0] * world, [0] * world
    for batch in batches:
        share = len(batch) // llm.data
        counts = [sum(len(s["images"]) for s in batch[r * share : (r + 1) * share]) for r in range(llm.data)]
        enter = owners(counts, vision.data)
        leave = [(e, r) for r, e in enter]
        for _, e in enter:
            for rank in vision.replicas[e]:
                items[rank] += 1
        for totals, source, destination, moves, size in (
            (forward, llm, vision, enter, image),
            (forward, vision, llm, leave, feature),
            (backward, llm, vision, enter, feature),
        ):
            for rank, sent in enumerate(bytes_sent(source, destination, moves, size, world)):
                totals[rank] += sent
    assert [report.items["vision"] for report in reports] == items
    one_process = sum(len(sample["images"]) for batch in batches for sample in batch)
    assert sum(items) == one_process * vision.tensor
    assert [report.forward_bytes["vision"] for report in reports] == forward
    assert [report.backward_bytes["vision"] for report in reports] == backward
