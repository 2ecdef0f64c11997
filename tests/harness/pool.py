"""A pool of warm processes that stand in for ranks; the parent's side."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver, get_context, util
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.harness.worker import Call, Outcome, serve

START_TIMEOUT = 180.0
GRACE = 2.0  # after a rank died or lost a connection, how long the cause may take to report itself
MOMENT = 0.3  # after a rank raised, how long the others' earlier errors may still be on their way
TAIL = 4000  # characters of a worker's output that an error shows

# What a rank reports when another one went away: it yields to any other failure as the cause.
FOLLOW_UP = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|DistNetworkError|DistStoreError|"
    r"recvValueWithTimeout|failed to (recv|send)|gloo/transport|Application timeout"
)


class WorkerError(RuntimeError):
    """A run failed. The text holds the traceback of the rank that failed first, and the tail of its output.

    Attributes:
        rank: The rank that failed first.
        exception: What it raised, if it raised and that can be pickled; also the ``__cause__``.
        tracebacks: The tracebacks of all ranks that raised.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        exception: BaseException | None = None,
        tracebacks: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception
        self.tracebacks = tracebacks or {}


class Pool:
    """``size`` warm processes, each ready to be one rank of a run.

    One long-lived server imports torch, Lightning and the package once; workers are forked from it ahead of the run
    that needs them. A worker serves one run and is replaced, so nothing that a run leaves in a process (groups, meshes
    and the plans that DTensor caches for them, seeds, flags, environment) can reach the next one.

    Args:
        size: The largest number of ranks of a run.

    Example:
        >>> with Pool(4) as pool:
        ...     pool.run(os.getpid, 2)
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._directory = Path(tempfile.mkdtemp(prefix="pool-"))
        self._workers: list[_Worker] = []
        self._started = 0
        self._close = util.Finalize(self, _close, (self._workers, self._directory), exitpriority=100)
        _start_server()
        self._fill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. A closed pool runs nothing any more."""
        self._close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that the next run will use, by rank."""
        return [worker.pid for worker in self._workers]

    def run(self, fn: Callable[..., Any], n: int, /, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ``n`` ranks.

        Each rank finds the variables that torchrun sets; the process group is left to ``fn`` (or to the ``Trainer`` in
        it). Seeds differ between ranks.

        Args:
            fn: A function of a module that the workers can import.
            n: The number of ranks, at most the pool's size.
            *args: Its arguments, the same on every rank.
            timeout: Seconds until a rank that did not return counts as hung; all ranks of the run are then killed.
            **kwargs: Its keyword arguments.

        Returns:
            What the ranks returned, by rank.

        Raises:
            WorkerError: A rank raised, died or hung.
        """
        if not 1 <= n <= self.size:
            raise ValueError(f"a run takes 1 to {self.size} ranks, not {n}")
        if not self._close.still_active():
            raise ValueError("the pool is closed")
        payload = pickle.dumps((fn, args, kwargs))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._fill()
        workers = self._workers[:n]
        del self._workers[:n]
        ok = False
        try:
            for rank, worker in enumerate(workers):
                worker.wait_ready()
                worker.send(pickle.dumps(Call(payload, rank, n, store.port, timeout, list(sys.path))))
            outcomes = _collect(workers, timeout)
            error = _first_error(workers, outcomes, timeout)
            if error is not None:
                raise error from error.exception
            ok = True
            return [pickle.loads(outcome.value) for outcome in outcomes.values() if outcome is not None]
        finally:
            for worker in workers:
                worker.end(kill=not ok)
            self._fill()  # they come up while the test goes on

    def _fill(self) -> None:
        """Have ``size`` living workers, ready or on their way."""
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            worker.end(kill=True)
            self._workers.remove(worker)
        while len(self._workers) < self.size:
            self._workers.append(_Worker(self._directory / str(self._started)))
            self._started += 1


class _Worker:
    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory, self.log, self.stacks = directory, directory / "log", directory / "stacks"
        context = get_context("forkserver")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(self.log), str(self.stacks)))
        self.process.start()
        theirs.close()
        self.pid: int = self.process.pid or 0

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead worker is found by whoever waits for its answer
            self.conn.send_bytes(data)

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None where the worker died or stays silent."""
        with contextlib.suppress(EOFError, OSError):
            if self.conn.poll(timeout):
                return self.conn.recv_bytes()
        return None

    def wait_ready(self) -> None:
        if self.receive(START_TIMEOUT) != b"ready":
            raise RuntimeError(f"a worker did not start:\n{self.tail()}")

    def dump_stacks(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not self.stacks.stat().st_size:
            time.sleep(0.01)
        time.sleep(0.05)
        return self.stacks.read_text()

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-TAIL:]
        return ""

    def end(self, *, kill: bool) -> None:
        """End the process: by closing its connection, or at once."""
        self.conn.close()
        if not kill:
            self.process.join(GRACE)
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.process.join()
        shutil.rmtree(self.directory, ignore_errors=True)


def _collect(workers: list[_Worker], timeout: float) -> dict[int, Outcome | None]:
    """Wait for every rank's outcome; after a first failure only a little longer. None: the rank died. Missing: hung."""
    outcomes: dict[int, Outcome | None] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(workers):
        pending: dict[Any, int] = {}
        for rank, worker in enumerate(workers):
            if rank not in outcomes:
                pending |= {worker.conn: rank, worker.process.sentinel: rank}
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in {pending[item] for item in ready}:
            data = workers[rank].receive(0.0)
            outcome: Outcome | None = None if data is None else pickle.loads(data)
            outcomes[rank] = outcome
            if outcome is None or not outcome.ok:
                followed = outcome is None or FOLLOW_UP.search(outcome.error)
                deadline = min(deadline, time.monotonic() + (GRACE if followed else MOMENT))
    return dict(sorted(outcomes.items()))


def _first_error(workers: list[_Worker], outcomes: dict[int, Outcome | None], timeout: float) -> WorkerError | None:
    n = len(workers)
    raised = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and not outcome.ok}
    causes = {rank: outcome for rank, outcome in raised.items() if not FOLLOW_UP.search(outcome.error)}
    tracebacks = {rank: outcome.error for rank, outcome in raised.items()}
    dead = [rank for rank, outcome in outcomes.items() if outcome is None]
    if dead and not causes:
        worker = workers[dead[0]]
        worker.process.join(GRACE)
        message = f"rank {dead[0]} of {n} died (exit code {worker.process.exitcode})" + _tail(worker)
        return WorkerError(message, rank=dead[0], tracebacks=tracebacks)
    if raised:
        rank, outcome = min((causes or raised).items(), key=lambda item: item[1].at)
        exception = None if outcome.exception is None else pickle.loads(outcome.exception)
        message = f"rank {rank} of {n} raised:\n{outcome.error}" + _tail(workers[rank])
        return WorkerError(message, rank=rank, exception=exception, tracebacks=tracebacks)
    hung = [rank for rank in range(n) if rank not in outcomes]
    if hung:
        stacks = "".join(f"\n--- rank {rank} is at\n{workers[rank].dump_stacks()}" for rank in hung)
        message = f"ranks {hung} of {n} did not return within {timeout:g} s{stacks}" + _tail(workers[hung[0]])
        return WorkerError(message, rank=hung[0])
    return None


def _tail(worker: _Worker) -> str:
    output = worker.tail()
    return f"\n--- its output ends with\n{output}" if output else ""


def _close(workers: list[_Worker], directory: Path) -> None:
    while workers:
        workers.pop().end(kill=True)
    shutil.rmtree(directory, ignore_errors=True)


def _start_server() -> None:
    """Start the process that workers are forked from; it imports what they need, once, and starts no threads."""
    get_context("forkserver").set_forkserver_preload(["tests.harness.preload"])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with _environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), TOKENIZERS_PARALLELISM="false", **threads):
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
