"""Balance: every item once, in order, and the busiest replica close to what no assignment can beat."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.boundary.balance import BalanceMode, balance_items, item_costs, lower_bound
from lightning_hetero.boundary.route import Assignment, Segment, assign_items

Costs = list[list[float]]


def loads(assignment: Assignment, costs: Costs) -> list[float]:
    return [sum(sum(costs[s.replica][s.start : s.stop]) for s in own if not s.standin) for own in assignment]


def placed(assignment: Assignment) -> dict[tuple[int, int], int]:
    """Item to module replica; fails if an item has two."""
    found: dict[tuple[int, int], int] = {}
    for e, own in enumerate(assignment):
        for s in own:
            for item in range(s.start, s.stop) if not s.standin else ():
                assert found.setdefault((s.replica, item), e) == e and s.stop > s.start
    return found


def heavy_tailed(rng: random.Random) -> float:
    """Patches of an image, as in mixtures of thumbnails, pages and videos, and what attention makes of them."""
    return item_costs([round(rng.lognormvariate(6, 1.2)) + 1], quadratic=1 / (6 * 1024))[0]


def batch(rng: random.Random, drivers: int, most: int) -> Costs:
    costs = [[heavy_tailed(rng) for _ in range(rng.randint(0, most))] for _ in range(drivers)]
    return costs if any(costs) else batch(rng, drivers, most)


def test_costs_are_quadratic_and_linear_in_rows() -> None:
    assert item_costs([0, 2, 10], linear=3.0, quadratic=0.5) == [0.0, 8.0, 80.0]
    assert item_costs([4]) == [4.0]


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50).map(float), max_size=7), min_size=1, max_size=7),
    st.integers(1, 9),
    st.sampled_from(["none", "replica", "global"]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_every_item_once_in_order_and_never_worse(
    costs: Costs, replicas: int, mode: BalanceMode, threshold: float
) -> None:
    assignment = balance_items(costs, replicas, mode, threshold)
    plain = assign_items([len(own) for own in costs], replicas)
    assert len(assignment) == replicas
    where = placed(assignment)
    assert sorted(where) == [(r, i) for r, own in enumerate(costs) for i in range(len(own))]
    for own in assignment:
        assert bool(own) == any(costs), "a replica has an item or a stand-in if there is any item"
        assert [(s.replica, s.start) for s in own] == sorted((s.replica, s.start) for s in own)
        for one, two in pairwise(own):
            assert (one.replica, one.stop) != (two.replica, two.start), "consecutive items are one segment"
        if any(s.standin for s in own):
            first = next(r for r, items in enumerate(costs) if items)
            assert own == (Segment(first, 0, 1, standin=True),)
    busiest, busiest_plain = max(loads(assignment, costs)), max(loads(plain, costs))
    assert lower_bound(costs, replicas, mode) <= busiest * (1 + 1e-9)
    assert assignment == plain or busiest < (1 - threshold) * busiest_plain
    if mode == "replica":  # only over replicas that overlap: [r/R, (r+1)/R) and [e/E, (e+1)/E)
        for (r, _), e in where.items():
            assert r * replicas < (e + 1) * len(costs) and (r + 1) * replicas > e * len(costs)
    assert balance_items(costs, replicas, mode, threshold) == assignment


@pytest.mark.parametrize(("drivers", "replicas"), [(8, 8), (2, 8), (8, 2), (4, 6), (3, 2), (64, 64)])
@pytest.mark.parametrize("most", [4, 12])
@pytest.mark.parametrize("mode", ["replica", "global"])
def test_the_busiest_replica_is_within_a_tenth_of_the_lower_bound(
    drivers: int, replicas: int, most: int, mode: BalanceMode
) -> None:
    rng = random.Random(20260)
    ratios, plain_ratios = [], []
    for _ in range(200):
        costs = batch(rng, drivers, most)
        if mode == "global":  # the bound, computed here
            total, items = sum(map(sum, costs)), [cost for own in costs for cost in own]
            bound = max(total / replicas, max(items))
            assert bound == pytest.approx(lower_bound(costs, replicas, mode))
        else:
            bound = lower_bound(costs, replicas, mode)
        ratios.append(max(loads(balance_items(costs, replicas, mode), costs)) / bound)
        plain_ratios.append(max(loads(balance_items(costs, replicas, "none"), costs)) / bound)
    assert median(ratios) <= 1.10, f"{median(ratios):.3f}, {median(plain_ratios):.3f} without balance"
    assert min(ratios) >= 1 - 1e-9


def test_bounds_of_spans() -> None:
    # Fan-out: each driver replica's items over its own two. Fan-in: nothing to choose. Straddling: 3 over 2.
    assert lower_bound([[4.0, 4.0], [1.0, 1.0]], 4, "replica") == 4.0
    assert lower_bound([[3.0, 3.0, 3.0], [1.0]], 4, "replica") == 4.5
    assert lower_bound([[5.0], [4.0], [1.0], [1.0]], 2, "replica") == 9.0
    assert lower_bound([[5.0], [4.0], [1.0], [1.0]], 2, "global") == 5.5
    assert lower_bound([[2.0, 2.0], [2.0, 2.0], [1.0]], 2, "replica") == 4.5
    assert lower_bound([[], []], 2, "global") == 0.0


def test_fan_out_spreads_a_replicas_items_by_cost() -> None:
    costs = [[9.0, 9.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    assert loads(assign_items([4, 4], 4), costs) == [18, 2, 2, 2]
    assignment = balance_items(costs, 4, "replica")
    assert sorted(loads(assignment, costs)[:2]) == [10, 10]
    assert assignment[2:] == ((Segment(1, 0, 2),), (Segment(1, 2, 4),)), "the others stay where they are"
    # All over all: the two expensive items alone.
    assert sorted(loads(balance_items(costs, 4, "global"), costs)) == [3, 3, 9, 9]


def test_fan_in_has_a_choice_only_globally() -> None:
    costs = [[8.0, 1.0], [8.0], [1.0], [1.0]]
    assert balance_items(costs, 2, "replica") == assign_items([2, 1, 1, 1], 2)
    assert sorted(loads(balance_items(costs, 2, "global"), costs)) == [9, 10]


def test_a_straddling_replica_counts_what_it_does_for_both() -> None:
    # Three module replicas over two driver replicas; the middle one may help either, and has to help the first.
    costs = [[6.0, 6.0, 6.0], [6.0]]
    plain = assign_items([3, 1], 3)
    assert loads(plain, costs) == [12, 6, 6]
    assert balance_items(costs, 3, "replica") == plain, "[6, 12, 6] or [12, 6, 6]: no better"
    costs = [[6.0, 6.0, 2.0], [2.0, 2.0, 2.0]]
    assert loads(assign_items([3, 3], 3), costs) == [12, 4, 4]
    assert loads(balance_items(costs, 3, "replica"), costs) == [8, 6, 6]


def test_order_survives_when_items_of_a_replica_are_apart() -> None:
    # The plain split is [9, 1] and [3, 3]: the cheap item changes sides and comes behind what is there.
    assignment = balance_items([[9.0, 1.0, 3.0, 3.0]], 2, "replica")
    assert assignment == ((Segment(0, 0, 1),), (Segment(0, 1, 4),))
    # Items that are no neighbours become segments of their own, in order.
    assignment = balance_items([[1.0, 9.0, 9.0, 1.0, 9.0, 1.0, 1.0, 1.0]], 2, "replica")
    assert assignment == (
        (Segment(0, 1, 2), Segment(0, 4, 5)),
        (Segment(0, 0, 1), Segment(0, 2, 4), Segment(0, 5, 8)),
    )


def test_a_swap_repairs_what_longest_first_gets_wrong() -> None:
    # Longest first pairs 3 + 2 + 2 with 3 + 2; exchanging a 3 for a 2 makes both 6.
    costs = [[2.0, 3.0, 2.0, 2.0, 3.0]]
    assert loads(balance_items(costs, 2, "replica", threshold=0.0), costs) == [6, 6]


def test_a_gain_below_the_threshold_moves_nothing() -> None:
    costs = [[10.0, 10.0], [9.0, 10.0]]
    costs[0][1] = 11.0  # 21 and 19: one swap makes it 20 and 20, a gain of 4.8 %
    plain = assign_items([2, 2], 2)
    assert balance_items(costs, 2, "global", threshold=0.05) == plain
    assert sorted(loads(balance_items(costs, 2, "global", threshold=0.04), costs)) == [20, 20]


def test_few_items_leave_their_place() -> None:
    rng = random.Random(1)
    moved = total = 0.0
    for _ in range(20):
        costs = [[heavy_tailed(rng) for _ in range(8)] for _ in range(32)]
        before, after = (placed(balance_items(costs, 32, mode)) for mode in ("none", "global"))  # type: ignore[arg-type]
        moved += sum(costs[r][i] for (r, i), e in after.items() if before[r, i] != e)
        total += sum(map(sum, costs))
    assert moved / total < 0.25, "by cost; greedy placement alone would move 31/32"


def test_no_items_and_unknown_modes() -> None:
    assert balance_items([[], []], 3, "global") == ((), (), ())
    assert balance_items([[0.0], [0.0, 0.0]], 2, "global") == assign_items([1, 2], 2), "free items stay"
    with pytest.raises(ValueError, match="balance must be 'none', 'replica' or 'global', got 'all'"):
        balance_items([[1.0]], 1, "all")  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [heavy_tailed, lambda rng: rng.uniform(1, 2)], ids=["heavy_tailed", "uniform"])
def test_a_large_step_takes_milliseconds(cost: Callable[[random.Random], float]) -> None:
    rng = random.Random(0)
    costs = [[cost(rng) for _ in range(8)] for _ in range(512)]
    times = []
    for _ in range(10):
        start = time.perf_counter()
        balance_items(costs, 512, "global", threshold=0.0)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02, "3 to 5 ms on one core of a server; the margin is for busy machines"
