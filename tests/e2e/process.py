"""A command as a user runs it: in a process of its own, of which nothing may be left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "lightning_hetero.cli")
_MARKER = "LIGHTNING_HETERO_TEST_RUN"
_OURS = ("PL_", "WANDB_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_")
_GRACE = 10.0  # seconds that ranks and logging services have to end after the process that started them


def run(*command: str, cwd: Path, timeout: float = 240.0, env: Mapping[str, str] | None = None) -> str:
    """Runs a command and waits until all its processes have ended.

    Args:
        *command: The program and its arguments.
        cwd: Its working directory, which also gets its output: ``stdout.txt`` and ``stderr.txt``.
        timeout: Seconds after which it counts as hung.
        env: Added to the environment.

    Returns:
        What it wrote to standard output.

    Raises:
        AssertionError: It failed, hung, or left a process behind.
    """
    marker = f"{_MARKER}={uuid.uuid4()}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    clean |= {"PYTHONPATH": str(ROOT), "COLUMNS": "160", **dict([marker.split("=")]), **(env or {})}
    cwd.mkdir(parents=True, exist_ok=True)
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    code: int | None = None
    with out.open("wb") as stdout, err.open("wb") as stderr:
        # Files, not pipes: a process that is left behind would keep a pipe open.
        process = subprocess.Popen(command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            left = _wait_for_end(marker, _GRACE if code == 0 else 0.0)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait()
    text = out.read_text(errors="replace")
    state = f"hung for {timeout:.0f} s" if code is None else f"exited with {code}"
    assert code == 0, f"{' '.join(command)}: {state}\n{text[-2000:]}\n{err.read_text(errors='replace')[-6000:]}"
    assert not left, f"{' '.join(command)} left {len(left)} processes behind"
    return text


def _wait_for_end(marker: str, seconds: float) -> list[int]:
    """Processes with the marker in their environment that still run after some seconds at most."""
    deadline = time.monotonic() + seconds
    while (left := _processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _processes(marker: str) -> list[int]:
    """Ids of processes that inherited the marker; none where the system has no ``/proc``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return found
