"""The parity check sees each class of bug, in every layout in which the bug changes the result, and only there."""

from __future__ import annotations

from functools import partial

import pytest

from tests.dist import vlm
from tests.dist.test_parity import GLOBAL_BATCH, LAYOUTS, case, layout_id
from tests.harness import Pool
from tests.harness import mutations as m
from tests.harness.parity import reference_run, train_rank

CAUGHT, BLIND = 1e-4, 1e-10


@pytest.mark.parametrize(("vision", "llm"), LAYOUTS, ids=map(layout_id, LAYOUTS))
def test_every_mutation_is_caught(pool: Pool, vision: tuple[int, int], llm: tuple[int, int]) -> None:
    same = vision == llm
    # name -> the fault, and whether it changes the result in this layout
    table = {
        "encoder's own size": (partial(m.scaled_gradient, "vision", vision[0] / llm[0]), vision[0] != llm[0]),
        "swapped siblings": (m.swapped_siblings, not same),
        "dropped sibling": (partial(m.dropped_sibling, backward=False), True),
        "dropped gradient": (partial(m.dropped_sibling, backward=True), True),
        "zero gradient": (m.zero_gradient, True),
        "partial sum dropped": (partial(m.partial_sum, 0), llm[1] > 1),
        "partial sum twice": (partial(m.partial_sum, 2), llm[1] > 1),
        "literal transpose": (m.literal_transpose, not same),
    }
    batches = [vlm.samples(GLOBAL_BATCH)]
    cases = [case(vision, llm, ("full", "full"), mutation=mutation) for mutation, _ in table.values()]
    reference = reference_run(vlm.build, batches, vlm.collate)
    by_rank = pool.run(
        train_rank, vision[0] * vision[1], cases, vlm.build, batches, vlm.collate, reference, timeout=240
    )
    for (name, (_, changes)), reports in zip(table.items(), zip(*by_rank, strict=True), strict=True):
        worst = max(report.worst for report in reports)
        assert (worst > CAUGHT) if changes else (worst < BLIND), f"{name}: {worst:.1e}"
