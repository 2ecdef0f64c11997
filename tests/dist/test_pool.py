"""The worker pool keeps its promises: ranks as torchrun makes them, and a clear end for every run that fails."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness import Pool, WorkerError


def rank_of_run() -> int:
    return int(os.environ["RANK"])


def pid() -> int:
    return os.getpid()


def echo(*args, **kwargs):
    return rank_of_run(), args, kwargs


def groups_and_meshes():
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    groups = [dist.new_group(list(range(size))) for size in range(1, n + 1)]
    names = [group.group_name for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("data", "tensor"))
    rows = distribute_tensor(torch.arange(2.0 * n * 3).view(2 * n, 3), mesh, [Shard(0), Replicate()])
    return total.item(), (rows @ rows.T).full_tensor(), names[-1]


def trainer_fit():
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    n = int(os.environ["WORLD_SIZE"])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=n, strategy="ddp", max_steps=2, limit_val_batches=0, logger=False, **quiet
    )
    trainer.fit(BoringModel())
    assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
    return trainer.global_rank, trainer.world_size, trainer.global_step


def fail_on(rank: int):
    dist.init_process_group("gloo")
    if rank_of_run() == rank:
        print("said before the failure")
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def fail_after_hanging_up(rank: int):
    """The others' connections break well before the cause is raised."""
    dist.init_process_group("gloo")
    if rank_of_run() == rank:
        dist.destroy_process_group()
        time.sleep(0.5)
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def die(rank: int):
    dist.init_process_group("gloo")
    if rank_of_run() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def leave(rank: int):
    if rank_of_run() == rank:
        sys.exit(3)


def wait_for_nobody():
    time.sleep(600)


def hang_on(rank: int):
    if rank_of_run() == rank:
        wait_for_nobody()


def return_what_cannot_travel():
    return lambda: None


class Untransportable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_what_cannot_travel():
    raise Untransportable(1, 2)


def pollute():
    os.environ["POLLUTED"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    sys.argv.append("--polluted")


def polluted():
    return (
        "POLLUTED" in os.environ,
        torch.get_default_dtype() != torch.float32,
        torch.are_deterministic_algorithms_enabled(),
        "--polluted" in sys.argv,
    )


def draw():
    return torch.rand(2)


def assert_works(pool: Pool) -> None:
    assert [total for total, *_ in pool.run(groups_and_meshes, 4)] == [6.0] * 4


def test_results_come_by_rank_with_arguments_passed(pool):
    results = pool.run(echo, 3, torch.ones(2), name={"a": 1})
    assert [rank for rank, *_ in results] == [0, 1, 2]
    assert all(torch.equal(args[0], torch.ones(2)) and kwargs == {"name": {"a": 1}} for _, args, kwargs in results)


def test_worlds_of_changing_size_follow_each_other(pool):
    for n in (8, 3, 6, 2, 8):
        rows = torch.arange(2.0 * n * 3).view(2 * n, 3)
        results = pool.run(groups_and_meshes, n)
        assert [total for total, *_ in results] == [n * (n - 1) / 2] * n
        assert all(torch.equal(product, rows @ rows.T) for _, product, _ in results)
        assert len({name for *_, name in results}) == 1


def test_trainer_takes_the_ranks_as_torchruns(pool):
    assert pool.run(trainer_fit, 3) == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]


def test_first_failure_is_raised_with_its_traceback_and_output(pool):
    with pytest.raises(WorkerError, match="rank 1 of 3 raised") as info:
        pool.run(fail_on, 3, 1)
    error = info.value
    assert error.rank == 1
    assert "in fail_on" in str(error) and "ValueError: the cause" in str(error)
    assert "said before the failure" in str(error)
    assert isinstance(error.exception, ValueError) and error.__cause__ is error.exception
    assert_works(pool)


def test_broken_connections_are_not_mistaken_for_the_cause(pool):
    with pytest.raises(WorkerError, match="the cause") as info:
        pool.run(fail_after_hanging_up, 3, 2)
    assert info.value.rank == 2
    assert len(info.value.tracebacks) > 1  # the others' came, and came earlier


def test_hung_rank_is_killed_in_time_and_says_where_it_was(pool):
    pids = pool.pids[:3]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"ranks \[2\] of 3 did not return within 1 s") as info:
        pool.run(hang_on, 3, 2, timeout=1)
    assert time.monotonic() - start < 20  # a loaded machine takes its time; the rank would have slept for 600 s
    assert "in wait_for_nobody" in str(info.value)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert_works(pool)


@pytest.mark.parametrize(("fn", "text"), [(die, r"rank 1 of 3 died \(exit code -9\)"), (leave, "SystemExit: 3")])
def test_dead_rank_is_reported_and_replaced(pool, fn, text):
    with pytest.raises(WorkerError, match=text) as info:
        pool.run(fn, 3, 1)
    assert info.value.rank == 1
    assert len(pool.pids) == 8
    assert_works(pool)


def test_worker_that_dies_between_runs_is_replaced(pool):
    victim = pool.pids[1]
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.2)
    assert victim not in pool.run(pid, 8)


def test_what_cannot_be_pickled_is_an_error_and_not_a_hang(pool):
    with pytest.raises(WorkerError, match=r"return_what_cannot_travel\.<locals>"):
        pool.run(return_what_cannot_travel, 2)
    with pytest.raises(WorkerError, match="Untransportable: 1 and 2") as info:
        pool.run(raise_what_cannot_travel, 2)
    assert info.value.exception is None


def test_no_state_passes_from_one_run_to_the_next(pool):
    pool.run(pollute, 8)
    assert pool.run(polluted, 8) == [(False, False, False, False)] * 8


def test_seeds_differ_between_ranks_and_repeat_between_runs(pool):
    first, second = pool.run(draw, 2), pool.run(draw, 2)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_workers_are_silent(pool, capfd):
    with pytest.raises(WorkerError):
        pool.run(fail_on, 2, 0)
    captured = capfd.readouterr()
    assert not captured.out and not captured.err


def test_pool_outside_of_pytest_ends_its_workers():
    with Pool(2) as pool:
        pids = pool.run(pid, 2) + pool.pids
        with pytest.raises(ValueError, match="1 to 2 ranks, not 3"):
            pool.run(pid, 3)
    assert len(set(pids)) == 4
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(ValueError, match="closed"):
        pool.run(pid, 2)
