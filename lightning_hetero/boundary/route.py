"""Routes: which rank sends which rows to which rank. Integers only, no processes.

Rows are counted on the side that holds them: a *piece* is a run of consecutive rows that moves as a whole from one
replica to another. Every rank computes its own part of a route from the same pieces, so nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

Replicas = tuple[tuple[int, ...], ...]
"""Ranks of each replica: its copies, which hold the same rows."""

Run = tuple[int, int]
"""Half-open range of rows."""


@dataclass(frozen=True)
class Segment:
    """A run of one driver replica's items that one module replica computes.

    Attributes:
        replica: The driver replica.
        start: First item, counted on that replica.
        stop: One past the last item.
        standin: The items are computed for their collectives only and their results dropped.
    """

    replica: int
    start: int
    stop: int
    standin: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


Assignment = tuple[tuple[Segment, ...], ...]
"""For each module replica the segments that it computes, in order."""


@dataclass(frozen=True)
class Piece:
    """Rows ``[source_start, source_start + size)`` of a source replica, for ``[start, start + size)`` of another."""

    source: int
    source_start: int
    destination: int
    start: int
    size: int


@dataclass(frozen=True)
class Route:
    """One rank's part of a transfer.

    Attributes:
        rows: Rows of the result on this rank.
        kept: ``(source_start, start, size)`` of rows that stay on this rank.
        sends: For each rank sent to, the runs of rows sent, in order.
        receives: For each rank received from, the runs of result rows that they fill, in order.
    """

    rows: int
    kept: tuple[tuple[int, int, int], ...]
    sends: tuple[tuple[int, tuple[Run, ...]], ...]
    receives: tuple[tuple[int, tuple[Run, ...]], ...]

    @cached_property
    def rows_sent(self) -> int:
        return sum(stop - start for _, runs in self.sends for start, stop in runs)

    @cached_property
    def rows_filled(self) -> int:
        """Rows of the result that the route fills."""
        received = sum(stop - start for _, runs in self.receives for start, stop in runs)
        return received + sum(size for *_, size in self.kept)

    def narrows(self) -> Run | None:
        """The source rows of a result that is one run of this rank's own rows, else ``None``."""
        if self.sends or self.receives or len(self.kept) != 1:
            return None
        source_start, start, size = self.kept[0]
        return (source_start, source_start + size) if start == 0 and size == self.rows else None


def assign_items(counts: Sequence[int], replicas: int) -> Assignment:
    """Spreads the items of all driver replicas over a module's replicas, each replica's items over those it spans.

    Put both sets of replicas on one interval: driver replica ``r`` of ``R`` covers ``[r/R, (r+1)/R)``, module replica
    ``e`` of ``E`` covers ``[e/E, (e+1)/E)``. On colocated ranks that is where they lie, so a segment goes to a module
    replica that shares ranks with it, and its items are cut in proportion to the overlaps.

    Args:
        counts: Items of each driver replica.
        replicas: Number of module replicas ``E``.

    Returns:
        The segments of every module replica. One that gets no item while others have some gets a copy of the first
        item as a stand-in, so that it takes part in the module's collectives.
    """
    total = len(counts)
    assignment: list[tuple[Segment, ...]] = []
    for e in range(replicas):
        segments = []
        # Driver replicas that overlap [e/E, (e+1)/E): those with r * E < (e + 1) * R and (r + 1) * E > e * R.
        for r in range(e * total // replicas, -(-(e + 1) * total // replicas)):
            start = _share(counts[r], e * total - r * replicas, replicas)
            stop = _share(counts[r], (e + 1) * total - r * replicas, replicas)
            if stop > start:
                segments.append(Segment(r, start, stop))
        assignment.append(tuple(segments))
    if any(assignment):
        first = Segment(next(r for r, n in enumerate(counts) if n), 0, 1, standin=True)
        assignment = [segments or (first,) for segments in assignment]
    return tuple(assignment)


def _share(count: int, numerator: int, denominator: int) -> int:
    return count * min(max(numerator, 0), denominator) // denominator


Offsets = tuple[tuple[int, ...], ...]
"""For each driver replica the first row of each of its items, and one past the last row."""


def row_offsets(rows: Iterable[Sequence[int]]) -> Offsets:
    """Offsets of items that have these numbers of rows, for each driver replica."""
    return tuple(tuple(accumulate(own, initial=0)) for own in rows)


def enter_pieces(assignment: Assignment, offsets: Offsets) -> list[Piece]:
    """Pieces from the driver's replicas to the module's.

    Args:
        assignment: Which module replica computes which items.
        offsets: Of the tensor that moves.
    """
    return [piece for piece, _ in _enter(assignment, offsets)]


def enter_back_pieces(assignment: Assignment, offsets: Offsets) -> list[Piece]:
    """Pieces of the way back of what entered: a stand-in's gradient is nobody's, only real items have one."""
    return reverse(piece for piece, segment in _enter(assignment, offsets) if not segment.standin)


def leave_pieces(assignment: Assignment, offsets: Offsets) -> list[Piece]:
    """Pieces from the module's replicas back to the items' driver replicas; stand-ins stay behind."""
    return enter_back_pieces(assignment, offsets)


def _enter(assignment: Assignment, offsets: Offsets) -> Iterator[tuple[Piece, Segment]]:
    for e, segments in enumerate(assignment):
        position = 0
        for segment in segments:
            start = offsets[segment.replica][segment.start]
            size = offsets[segment.replica][segment.stop] - start
            yield Piece(segment.replica, start, e, position, size), segment
            position += size


def held_rows(segments: Iterable[Segment], offsets: Offsets) -> int:
    """Rows of the items in some segments, stand-ins included."""
    return sum(offsets[s.replica][s.stop] - offsets[s.replica][s.start] for s in segments)


def reverse(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces of the way back: what a destination replica holds goes to where it came from."""
    return [Piece(p.destination, p.start, p.source, p.source_start, p.size) for p in pieces]


def plan_route(pieces: Iterable[Piece], sources: Replicas, destinations: Replicas, rank: int, rows: int) -> Route:
    """One rank's route.

    Every copy of a destination replica gets each of its rows exactly once: from itself where it holds them,
    otherwise from one of the copies of the source replica, which take turns.

    This holds for the backward too. A gradient is equal on all copies of the replica that has it, so the backward of
    a transfer is the route of the reversed pieces with the layouts exchanged, and nothing is summed. The transpose of
    the forward route would add copies up, or leave some without a gradient.

    Args:
        pieces: What moves, the same on every rank.
        sources: Ranks of each source replica.
        destinations: Ranks of each destination replica.
        rank: The rank to plan for.
        rows: Rows of the result on this rank (0 outside the destinations).
    """
    kept: list[tuple[int, int, int]] = []
    sends: dict[int, list[Run]] = {}
    receives: dict[int, list[Run]] = {}
    for piece in pieces:
        holders, takers = sources[piece.source], destinations[piece.destination]
        if rank not in holders and rank not in takers:
            continue
        for copy, taker in enumerate(takers):
            holder = taker if taker in holders else holders[copy % len(holders)]
            if taker == holder == rank:
                kept.append((piece.source_start, piece.start, piece.size))
            elif holder == rank:
                sends.setdefault(taker, []).append((piece.source_start, piece.source_start + piece.size))
            elif taker == rank:
                receives.setdefault(holder, []).append((piece.start, piece.start + piece.size))
    return Route(rows=rows, kept=tuple(kept), sends=_freeze(sends), receives=_freeze(receives))


def _freeze(runs: dict[int, list[Run]]) -> tuple[tuple[int, tuple[Run, ...]], ...]:
    return tuple((rank, tuple(runs[rank])) for rank in sorted(runs))
