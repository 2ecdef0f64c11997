"""Routes: integers only. A simulation of all ranks shows what arrives where, for any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.boundary.route import (
    Offsets,
    Piece,
    Replicas,
    Route,
    Segment,
    assign_items,
    enter_pieces,
    leave_pieces,
    plan_route,
    reverse,
    row_offsets,
)


def colocated(data: int, tensor: int) -> Replicas:
    return tuple(tuple(range(d * tensor, (d + 1) * tensor)) for d in range(data))


def uniform(counts: list[int], rows: int = 1) -> Offsets:
    return row_offsets([[rows] * count for count in counts])


def run(routes: list[Route], held: list[list[object]]) -> list[list[object]]:
    """Executes all ranks' routes on lists of rows; fails on a message that only one side knows of."""
    results: list[list[object]] = [[None] * route.rows for route in routes]
    messages = {}
    for rank, route in enumerate(routes):
        for source_start, start, size in route.kept:
            results[rank][start : start + size] = held[rank][source_start : source_start + size]
        for peer, runs in route.sends:
            messages[rank, peer] = [row for start, stop in runs for row in held[rank][start:stop]]
    for rank, route in enumerate(routes):
        for peer, runs in route.receives:
            rows = iter(messages.pop((peer, rank)))
            for start, stop in runs:
                results[rank][start:stop] = [next(rows) for _ in range(stop - start)]
            assert next(rows, None) is None
    assert not messages
    return results


sizes = st.tuples(st.integers(1, 8), st.integers(1, 8)).flatmap(
    lambda s: st.sampled_from(
        [(d, s[0] * s[1] // d) for d in range(1, s[0] * s[1] + 1) if s[0] * s[1] % d == 0]
    ).flatmap(lambda m: st.just((s, m)))
)


@settings(max_examples=300, deadline=None)
@given(sizes, st.data())
def test_every_copy_gets_every_row_once_in_order_there_and_back(
    layouts: tuple[tuple[int, int], tuple[int, int]], data: st.DataObject
) -> None:
    (driver_data, driver_tensor), (module_data, module_tensor) = layouts
    driver, module = colocated(driver_data, driver_tensor), colocated(module_data, module_tensor)
    counts = data.draw(st.lists(st.integers(0, 6), min_size=driver_data, max_size=driver_data))
    rows_per_item = data.draw(st.integers(1, 3))
    world = driver_data * driver_tensor
    driver_of = {rank: r for r, ranks in enumerate(driver) for rank in ranks}
    module_of = {rank: e for e, ranks in enumerate(module) for rank in ranks}
    assignment = assign_items(counts, module_data)

    # Enter: items are (replica, index).
    held: list[list[object]] = [[(driver_of[r], i) for i in range(counts[driver_of[r]])] for r in range(world)]
    share = [sum(s.size for s in assignment[module_of[rank]]) for rank in range(world)]
    pieces = enter_pieces(assignment, uniform(counts))
    entered = run([plan_route(pieces, driver, module, rank, share[rank]) for rank in range(world)], held)
    for rank in range(world):
        expected = [(s.replica, i) for s in assignment[module_of[rank]] for i in range(s.start, s.stop)]
        assert entered[rank] == expected
    if any(counts):
        assert all(share), "a module replica without an item would leave the others' collectives"

    # Leave: each item became rows; a replica gets the rows of its items, in its order.
    computed = [[(item, k) for item in items for k in range(rows_per_item)] for items in entered]
    back = leave_pieces(assignment, uniform(counts, rows_per_item))
    left = run(
        [plan_route(back, module, driver, rank, counts[driver_of[rank]] * rows_per_item) for rank in range(world)],
        computed,  # type: ignore[arg-type]
    )
    for rank in range(world):
        assert left[rank] == [(item, k) for item in held[rank] for k in range(rows_per_item)]

    # The backward of leaving: every copy of the module gets the gradient of each of its real rows once.
    gradients = run(
        [plan_route(reverse(back), driver, module, rank, share[rank] * rows_per_item) for rank in range(world)], left
    )
    for rank in range(world):
        real = [s for s in assignment[module_of[rank]] if not s.standin]
        assert [g for g in gradients[rank] if g is not None] == (computed[rank] if real else [])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_items_are_spread_in_proportion_and_none_is_lost(counts: list[int], replicas: int) -> None:
    assignment = assign_items(counts, replicas)
    real = [[s for s in segments if not s.standin] for segments in assignment]
    seen = [(s.replica, i) for segments in real for s in segments for i in range(s.start, s.stop)]
    assert sorted(seen) == [(r, i) for r, n in enumerate(counts) for i in range(n)]
    if replicas % len(counts) == 0:  # fan-out: a replica's items are cut as evenly as they go
        span = replicas // len(counts)
        for r, count in enumerate(counts):
            shares = [sum(s.size for s in segments) for segments in real[r * span : (r + 1) * span]]
            assert max(shares) - min(shares) <= 1
            assert sum(shares) == count


def test_replicas_that_straddle() -> None:
    # Three module replicas over two driver replicas of three items: the middle one serves both.
    assert assign_items([3, 3], 3) == (
        (Segment(0, 0, 2),),
        (Segment(0, 2, 3), Segment(1, 0, 1)),
        (Segment(1, 1, 3),),
    )


def test_a_replica_without_items_computes_a_copy_of_a_real_one() -> None:
    assert assign_items([0, 1], 2) == ((Segment(1, 0, 1, standin=True),), (Segment(1, 0, 1),))
    assert assign_items([0, 0], 2) == ((), ())


def test_nothing_moves_where_rows_are_already_held() -> None:
    # Encoder on 4 replicas, driver on 2 of 2 ranks: entering narrows to this rank's half.
    pieces = enter_pieces(assign_items([4, 4], 4), uniform([4, 4]))
    routes = [plan_route(pieces, colocated(2, 2), colocated(4, 1), rank, 2) for rank in range(4)]
    assert [route.narrows() for route in routes] == [(0, 2), (2, 4), (0, 2), (2, 4)]
    # Leaving gathers: two of the four rows come from the other rank.
    back = leave_pieces(assign_items([4, 4], 4), uniform([4, 4]))
    assert [plan_route(back, colocated(4, 1), colocated(2, 2), rank, 4).rows_sent for rank in range(4)] == [2] * 4


def test_copies_take_turns_in_sending() -> None:
    # One replica of four copies feeds four copies elsewhere: each sends once.
    routes = [plan_route([Piece(0, 0, 0, 0, 5)], ((0, 1, 2, 3),), ((4, 5, 6, 7),), rank, 5) for rank in range(4)]
    assert [[peer for peer, _ in route.sends] for route in routes] == [[4], [5], [6], [7]]


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (4, 2)])
def test_equal_layouts_move_nothing(data: int, tensor: int) -> None:
    pieces = enter_pieces(assign_items([3] * data, data), uniform([3] * data))
    for rank in range(data * tensor):
        assert plan_route(pieces, colocated(data, tensor), colocated(data, tensor), rank, 3).narrows() == (0, 3)
