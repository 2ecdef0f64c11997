"""Balance: which module replica computes which item, so that the busiest one has as little to do as possible.

Items differ in cost (a video beside a thumbnail), and a step takes as long as its busiest replica. Pure Python on
integers and floats that all ranks know: every rank computes the same assignment, and nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace, nsmallest
from itertools import accumulate, chain
from math import gcd
from typing import Literal

from lightning_hetero.boundary.route import Assignment, Segment, assign_items

BalanceMode = Literal["none", "replica", "global"]

_SWAPS = 16
"""Most moves and swaps after the greedy pass."""

_PARTNERS = 4
"""Least busy replicas that are looked at for one of them."""

_CLOSE = 1.01
"""Times the lower bound below which no further swap is looked for."""


def item_costs(rows: Sequence[int], *, linear: float = 1.0, quadratic: float = 0.0) -> list[float]:
    """The cost of each item: ``quadratic * l**2 + linear * l`` for an item of ``l`` rows.

    Attention compares every row of an item with every other; all else (projections, MLP, norms) handles each row by
    itself. Counted in multiplications, a transformer block of width ``d`` with an MLP of ``4 * d`` has
    ``12 * d**2 * l`` in its matrices (4 projections, 2 of the MLP) and ``2 * d * l**2`` in its attention (scores and
    weighted values), so ``linear=1, quadratic=1 / (6 * d)`` fits a vision transformer.

    Args:
        rows: Rows of each item inside the encoder (patches, frames), before any merging.
        linear: Cost of a row by itself.
        quadratic: Cost of a pair of rows.

    Returns:
        Costs in the unit of ``linear``.
    """
    return [quadratic * length * length + linear * length for length in rows]


def balance_items(
    costs: Sequence[Sequence[float]], replicas: int, mode: BalanceMode, threshold: float = 0.05
) -> Assignment:
    """Assigns the items of a step to a module's replicas.

    The most expensive items are placed first. Each stays where the plain contiguous split (:func:`assign_items`) has
    it as long as that replica remains below what even the best assignment needs, so that few items move; the others
    go to the replica that is least busy so far. Then the busiest replica gives items away, or swaps them, a few times.

    Args:
        costs: ``costs[r][i]`` is the cost of item ``i`` of driver replica ``r``, not negative.
        replicas: Number of module replicas.
        mode: ``"none"`` splits by counts. ``"replica"`` spreads a driver replica's items over the module replicas
            that it overlaps on the interval of :func:`assign_items`, on colocated ranks those that hold its items
            already; a module replica that overlaps several takes the items of all of them into account.
            ``"global"`` spreads all items over all module replicas.
        threshold: Smallest worthwhile gain: the share of the busiest replica's cost that balancing has to save over
            the plain split, which otherwise stays, because it moves less.

    Returns:
        The segments of every module replica, ordered by driver replica and item. A replica without items, while
        others have some, gets the step's first item as a stand-in.

    Raises:
        ValueError: If the mode is unknown.
    """
    if mode not in ("none", "replica", "global"):
        raise ValueError(f"balance must be 'none', 'replica' or 'global', got {mode!r}")
    plain = assign_items([len(own) for own in costs], replicas)
    if mode == "none":
        return plain
    busiest = max(sum(sum(costs[s.replica][s.start : s.stop]) for s in own if not s.standin) for own in plain)
    bound = lower_bound(costs, replicas, mode)
    if busiest - bound <= threshold * busiest:
        return plain
    # From here on items are counted through, over all driver replicas.
    cost = list(chain.from_iterable(costs))
    owner = [r for r, own in enumerate(costs) for _ in own]
    first = list(accumulate(map(len, costs), initial=0))
    home = [0] * len(cost)
    for e, own in enumerate(plain):
        for s in own:
            if not s.standin:
                home[first[s.replica] + s.start : first[s.replica] + s.stop] = [e] * s.size
    spans = _spans(len(costs), replicas, mode)
    shares, loads = _place(cost, owner, home, spans, replicas, bound)
    _improve(shares, loads, cost, owner, spans, bound)
    if busiest - max(loads) <= threshold * busiest:
        return plain
    standin = (Segment(owner[0], 0, 1, standin=True),)
    return tuple(_segments(share, owner, first) or standin for share in shares)


def lower_bound(costs: Sequence[Sequence[float]], replicas: int, mode: BalanceMode) -> float:
    """What the busiest module replica has to do at least, however the items are spread.

    That is the largest item, or the mean over module replicas that have to do some driver replicas' items by
    themselves: over all; with ``"replica"`` also over those that one driver replica overlaps, and between the points
    of the interval at which both sets of replicas meet.

    Args:
        costs: Of the items of each driver replica.
        replicas: Number of module replicas.
        mode: As in :func:`balance_items`.
    """
    totals = [sum(own) for own in costs]
    parts = gcd(len(costs), replicas) if mode == "replica" else 1
    drivers, modules = len(costs) // parts, replicas // parts
    return max(
        *(max(own, default=0.0) for own in costs),
        *(sum(totals[part * drivers : (part + 1) * drivers]) / modules for part in range(parts)),
        *(total / len(span) for total, span in zip(totals, _spans(len(costs), replicas, mode), strict=True)),
    )


def _spans(driver_replicas: int, replicas: int, mode: BalanceMode) -> list[range]:
    """For each driver replica the module replicas that may compute its items."""
    if mode == "global":
        return [range(replicas)] * driver_replicas
    return [
        range(r * replicas // driver_replicas, -(-(r + 1) * replicas // driver_replicas))
        for r in range(driver_replicas)
    ]


def _place(
    cost: Sequence[float],
    owner: Sequence[int],
    home: Sequence[int],
    spans: Sequence[range],
    replicas: int,
    bound: float,
) -> tuple[list[list[int]], list[float]]:
    """Longest processing time first (Graham 1969), with a preference for where an item is in the plain split.

    Returns:
        The items of every module replica, and the sums of their costs.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    # One heap for each span. The load of an entry may be out of date but is never too high: loads only grow.
    heaps = {span: [(0.0, e) for e in span] for span in set(spans)}
    heap_of = [heaps[span] for span in spans]
    limit = bound * (1 + 1e-9)
    for item in sorted(range(len(cost)), key=cost.__getitem__, reverse=True):
        e = home[item]
        if loads[e] + cost[item] > limit:
            heap = heap_of[owner[item]]
            load, e = heap[0]
            while load < loads[e]:
                heapreplace(heap, (loads[e], e))
                load, e = heap[0]
        shares[e].append(item)
        loads[e] += cost[item]
    return shares, loads


def _improve(
    shares: list[list[int]],
    loads: list[float],
    cost: Sequence[float],
    owner: Sequence[int],
    spans: Sequence[range],
    bound: float,
) -> None:
    """Lets the busiest replica give items away, or swap them for cheaper ones, in place."""
    for _ in range(_SWAPS):
        top = max(loads)
        if top <= bound * _CLOSE:
            return
        busy = loads.index(top)
        # All of these spans contain the busiest replica, so together they are one range.
        reach = [spans[owner[item]] for item in shares[busy]]
        others = range(min(span.start for span in reach), max(span.stop for span in reach))
        best, exchange = top * (1 - 1e-9), None
        for e in nsmallest(_PARTNERS, others, key=loads.__getitem__):
            returns = [(cost[item], item) for item in shares[e] if busy in spans[owner[item]]]
            for item in shares[busy]:
                if e in spans[owner[item]]:
                    for back, other in [(0.0, None), *returns]:
                        change = cost[item] - back
                        higher = max(top - change, loads[e] + change)
                        if higher < best:
                            best, exchange = higher, (e, item, other)
        if exchange is None:
            return
        e, item, other = exchange
        shares[busy].remove(item)
        shares[e].append(item)
        if other is not None:
            shares[e].remove(other)
            shares[busy].append(other)
        for replica in (busy, e):
            loads[replica] = sum(cost[item] for item in shares[replica])


def _segments(share: Sequence[int], owner: Sequence[int], first: Sequence[int]) -> tuple[Segment, ...]:
    """Items in order, consecutive ones of a driver replica as one segment."""
    runs: list[list[int]] = []
    for item in sorted(share):
        if runs and runs[-1][1] == item and owner[runs[-1][0]] == owner[item]:
            runs[-1][1] = item + 1
        else:
            runs.append([item, item + 1])
    return tuple(Segment(r := owner[start], start - first[r], stop - first[r]) for start, stop in runs)
