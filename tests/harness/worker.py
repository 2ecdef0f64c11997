"""The worker's side of the pool: wait for one call, run it as one rank, end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

EXIT_MARGIN = 30.0  # a worker whose parent is gone ends itself this long after its call's timeout


@dataclass
class Call:
    """One rank's part of a run. ``payload`` is the pickled ``(fn, args, kwargs)``."""

    payload: bytes
    rank: int
    world_size: int
    port: int
    timeout: float
    sys_path: list[str]


@dataclass
class Outcome:
    """What a rank's call came to; ``at`` is the machine's monotonic clock, comparable between processes."""

    ok: bool
    at: float
    value: bytes = b""
    error: str = ""
    exception: bytes | None = None


def serve(conn: Connection, log_path: str, stack_path: str) -> None:
    """Run the one call that comes over ``conn``, answer, and stay until the other side closes it.

    Staying keeps this rank's process groups up until every rank is done.
    """
    _redirect_output(log_path)
    with open(stack_path, "w") as stacks, contextlib.suppress(EOFError, ConnectionResetError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch

        from tests.harness import preload  # noqa: F401  (already there in a forked worker)

        torch.set_num_threads(1)
        conn.send_bytes(b"ready")
        call: Call = pickle.loads(conn.recv_bytes())
        faulthandler.dump_traceback_later(call.timeout + EXIT_MARGIN, exit=True, file=stacks)
        _become_rank(call)
        conn.send_bytes(pickle.dumps(_run(call)))
        conn.recv_bytes()


def _run(call: Call) -> Outcome:
    try:
        fn, args, kwargs = pickle.loads(call.payload)
        # Plain pickle, not multiprocessing's: tensors travel by value instead of through shared memory.
        return Outcome(ok=True, value=pickle.dumps(fn(*args, **kwargs)), at=time.monotonic())
    except BaseException as error:  # also SystemExit: it would end the worker without a word
        at = time.monotonic()
        return Outcome(ok=False, at=at, error=traceback.format_exc(), exception=_picklable(error))


def _picklable(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _redirect_output(log_path: str) -> None:
    fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _become_rank(call: Call) -> None:
    """Make this process look like rank ``call.rank`` of a job that torchrun started.

    The seeds differ between ranks on purpose, as they do in real processes: code that relies on equal initial values
    without broadcasting them must fail in a test.
    """
    import numpy
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.environ.update(_torchrun_environment(call))
    sys.argv[1:] = []
    sys.path[:] = call.sys_path
    rank_zero_only.rank = call.rank  # set at import from the environment, which came later here
    random.seed(call.rank)
    numpy.random.seed(call.rank)
    torch.manual_seed(call.rank)


def _torchrun_environment(call: Call) -> dict[str, str]:
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(call.port),
        "RANK": str(call.rank),
        "LOCAL_RANK": str(call.rank),
        "WORLD_SIZE": str(call.world_size),
        "LOCAL_WORLD_SIZE": str(call.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(call.rank),
        "ROLE_WORLD_SIZE": str(call.world_size),
        "TORCHELASTIC_RUN_ID": "pool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the pool serves the store, as torchrun does
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # no dependence on how the machine's name resolves
        environment["GLOO_SOCKET_IFNAME"] = loopback[0]
    return environment
