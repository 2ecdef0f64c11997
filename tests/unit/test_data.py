import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_hetero.data import GlobalOrder, ReplicaBatchSampler, replica_batch_sampler, shard_dataloader
from lightning_hetero.errors import HeteroError

cases = given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 6),
    num_replicas=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)


def replicas(length, batch_size, num_replicas, shuffle, drop_last, epoch=0, seed=5):
    samplers = [
        ReplicaBatchSampler(
            length,
            batch_size,
            num_replicas=num_replicas,
            replica=replica,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        for replica in range(num_replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def real_batches(sampler):
    """The batches without what stands in for a sample."""
    return [batch[: sampler.num_real(index)] for index, batch in enumerate(sampler)]


@cases
def test_union_of_replicas_is_the_batch_of_one_process(length, batch_size, num_replicas, shuffle, drop_last, epoch):
    samplers = replicas(length, batch_size, num_replicas, shuffle, drop_last, epoch)
    (whole,) = replicas(length, batch_size * num_replicas, 1, shuffle, drop_last, epoch)
    union = [list(chain(*shares)) for shares in zip(*map(real_batches, samplers), strict=True)]
    assert union == list(whole)


@cases
def test_every_sample_counts_once(length, batch_size, num_replicas, shuffle, drop_last, epoch):
    samplers = replicas(length, batch_size, num_replicas, shuffle, drop_last, epoch)
    seen = sorted(chain(*(chain(*real_batches(sampler)) for sampler in samplers)))
    whole = batch_size * num_replicas
    if drop_last:
        assert len(seen) == len(set(seen)) == length // whole * whole
    else:
        assert seen == list(range(length))


@cases
def test_replicas_have_equal_numbers_of_batches_and_even_shares(
    length, batch_size, num_replicas, shuffle, drop_last, epoch
):
    samplers = replicas(length, batch_size, num_replicas, shuffle, drop_last, epoch)
    assert len({len(sampler) for sampler in samplers}) == 1
    batches = [list(sampler) for sampler in samplers]
    assert {len(of_replica) for of_replica in batches} == {len(samplers[0])}
    for index in range(len(samplers[0])):
        sizes = [sampler.num_real(index) for sampler in samplers]
        assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
        assert [samplers[0].num_real(index, replica) for replica in range(num_replicas)] == sizes
        for of_replica, size in zip(batches, sizes, strict=True):
            assert len(of_replica[index]) == max(size, 1)  # never an empty batch
        first_of_global_batch = batches[0][index][0]
        assert all(b[index] == [first_of_global_batch] for b, size in zip(batches, sizes, strict=True) if size == 0)


def test_short_batch_by_example():
    assert [list(sampler) for sampler in replicas(13, 2, 4, False, False)] == [
        [[0, 1], [8, 9]],
        [[2, 3], [10]],
        [[4, 5], [11]],
        [[6, 7], [12]],
    ]
    samplers = replicas(10, 2, 4, False, False)
    assert [list(sampler)[1] for sampler in samplers] == [[8], [9], [8], [8]]
    assert [sampler.num_real(1) for sampler in samplers] == [1, 1, 0, 0]


def test_epochs_and_seeds_give_other_orders_and_repeat():
    sampler = ReplicaBatchSampler(40, 4, shuffle=True, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ReplicaBatchSampler(40, 4, shuffle=True, seed=2)) != first


def test_shuffling_is_torchs_distributed_samplers():
    """So that a run under another strategy, on one process, meets the samples in the same order."""
    theirs = DistributedSampler(range(40), num_replicas=1, rank=0, shuffle=True, seed=3)
    theirs.set_epoch(2)
    ours = GlobalOrder(40, shuffle=True, seed=3)
    ours.set_epoch(2)
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("index", [-1, 2])
def test_num_real_of_no_batch_is_an_error(index):
    with pytest.raises(IndexError, match=f"batch {index} of an epoch of 2 batches"):
        ReplicaBatchSampler(8, 4).num_real(index)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size of at least 1, got 0"),
        ({"batch_size": 1, "num_replicas": 2, "replica": 2}, "replica of 0 to 1 of 2, got 2"),
    ],
)
def test_wrong_arguments_are_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        ReplicaBatchSampler(8, **arguments)


class Backwards(Sampler[int]):
    """A user's sampler: an order of its own, that depends on the epoch."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([(index + self.epoch) % self.length for index in reversed(range(self.length))])

    def set_epoch(self, epoch):
        self.epoch = epoch


class PythonRandom(Backwards):
    def __iter__(self):
        return iter(random.sample(range(self.length), self.length))


class NumpyRandom(Backwards):
    def __iter__(self):
        return iter(np.random.permutation(self.length).tolist())


def test_users_sampler_keeps_its_order_and_hears_of_the_epoch():
    samplers = [ReplicaBatchSampler(Backwards(10), 2, num_replicas=2, replica=r) for r in range(2)]
    assert [list(sampler) for sampler in samplers] == [[[9, 8], [5, 4], [1]], [[7, 6], [3, 2], [0]]]
    samplers[0].set_epoch(1)
    assert next(iter(samplers[0])) == [0, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PythonRandom(20),
        lambda: NumpyRandom(20),
        lambda: RandomSampler(range(20), num_samples=15),
        lambda: WeightedRandomSampler([1.0] * 20, 20),
    ],
)
def test_random_sampler_of_the_user_agrees_between_ranks_and_leaves_their_generators_alone(make):
    orders = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        order = GlobalOrder(make(), seed=4)
        expected = random.Random(rank).random(), np.random.RandomState(rank).rand()
        orders.append(list(order))
        order.set_epoch(1)
        assert list(order) != orders[-1]
        assert (random.random(), np.random.rand()) == expected
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(rank)))
    assert orders[0] == orders[1]


def test_sampler_without_length_is_an_error_that_says_what_to_do():
    class Endless(Sampler[int]):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(HeteroError, match=r"Endless has no length.*__len__.*loader_rank.*use_distributed_sampler"):
        GlobalOrder(Endless())


def test_sampler_that_yields_another_number_than_it_says_is_an_error():
    class Wrong(Backwards):
        def __len__(self):
            return self.length + 1

    with pytest.raises(HeteroError, match="Wrong has length 5 but yielded 4"):
        list(GlobalOrder(Wrong(4)))


class KeepsNothing(DataLoader):
    """A subclass whose constructor takes what cannot be read off the instance."""

    def __init__(self, secret, dataset, batch):
        super().__init__(dataset, batch_size=batch, collate_fn=tuple)
        self.secret_length = len(secret)


def indices(loader):
    return [list(map(int, batch)) for batch in loader]


def shard(loader, replica=0, num_replicas=2, **kwargs):
    return shard_dataloader(loader, num_replicas=num_replicas, replica=replica, **kwargs)


def test_plain_loader_is_divided():
    loader = DataLoader(range(10), batch_size=2)
    assert [indices(shard(loader, replica)) for replica in range(2)] == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    assert len(shard(loader)) == 3
    assert indices(loader)[0] == [0, 1] and len(loader) == 5  # the user's own is left alone


def test_shuffling_loader_shuffles_by_seed_and_epoch():
    loaders = [shard(DataLoader(range(20), batch_size=4, shuffle=True), replica, seed=7) for replica in range(2)]
    first = [indices(loader) for loader in loaders]
    assert sorted(chain(*chain(*first))) == list(range(20))
    assert [indices(loader) for loader in loaders] == first
    assert first[0] == list(ReplicaBatchSampler(20, 4, num_replicas=2, replica=0, shuffle=True, seed=7))
    for loader in loaders:
        _set_sampler_epoch(loader, 1)  # as Lightning does
    second = [indices(loader) for loader in loaders]
    assert second != first and sorted(chain(*chain(*second))) == list(range(20))


@pytest.mark.parametrize("wish", [True, False])
def test_shuffle_overrides_what_the_loader_says(wish):
    loader = shard(DataLoader(range(20), batch_size=4, shuffle=not wish), shuffle=wish)
    assert loader.batch_sampler.sampler.shuffle is wish


def test_drop_last_drops_the_global_batch():
    loader = DataLoader(range(7), batch_size=2, drop_last=True)
    assert [indices(shard(loader, replica)) for replica in range(2)] == [[[0, 1]], [[2, 3]]]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("user_seed", [0, 11])
def test_injected_distributed_sampler_is_taken_out(shuffle, user_seed):
    """Two replicas and an injected sampler for three: a sampler that stayed would leave a third of the samples out."""
    injected = DistributedSampler(range(13), num_replicas=3, rank=1, shuffle=shuffle, seed=user_seed)
    loaders = [shard(DataLoader(range(13), 2, sampler=injected), replica, seed=99) for replica in range(2)]
    expected = replicas(13, 2, 2, shuffle, False, seed=user_seed)
    assert [indices(loader) for loader in loaders] == [list(sampler) for sampler in expected]


def test_sampler_of_the_user_survives_its_wrapper():
    injected = DistributedSamplerWrapper(Backwards(10), num_replicas=3, rank=1, shuffle=True, seed=3)
    loaders = [shard(DataLoader(range(10), 2, sampler=injected), replica) for replica in range(2)]
    assert [indices(loader) for loader in loaders] == [[[9, 8], [5, 4], [1]], [[7, 6], [3, 2], [0]]]
    assert loaders[0].batch_sampler.sampler.seed == 3


def test_loader_for_prediction_still_records_its_indices_and_keeps_every_sample():
    loader = DataLoader(range(10), batch_size=4, drop_last=True)
    injected = UnrepeatedDistributedSamplerWrapper(loader.sampler, num_replicas=2, rank=1, shuffle=False)
    loader = _update_dataloader(loader, injected, mode=RunningStage.PREDICTING)
    assert isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper)
    loaders = [shard(loader, replica) for replica in range(2)]
    assert [indices(of_replica) for of_replica in loaders] == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [9]]]
    assert loaders[1].batch_sampler.seen_batch_indices == [[4, 5, 6, 7], [9]]
    assert isinstance(replica_batch_sampler(loaders[1]), ReplicaBatchSampler)


def init_worker(index):
    torch.manual_seed(index)


def test_everything_else_about_the_loader_is_kept():
    generator = torch.Generator()
    loader = DataLoader(
        range(8),
        batch_size=2,
        num_workers=1,
        collate_fn=list,
        worker_init_fn=init_worker,
        generator=generator,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=9,
        multiprocessing_context="spawn",
    )
    sharded = shard(loader)
    assert type(sharded) is DataLoader and sharded is not loader
    for name in ("dataset", "num_workers", "collate_fn", "worker_init_fn", "generator", "pin_memory"):
        assert getattr(sharded, name) is getattr(loader, name)
    for name in ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context", "in_order"):
        assert getattr(sharded, name) == getattr(loader, name)


def test_worker_processes_deliver_the_replicas_batches():
    loader = DataLoader(range(10), batch_size=2, num_workers=1, persistent_workers=True)
    assert indices(loader)[0] == [0, 1]  # its workers live on, and must not serve the copy
    sharded = shard(loader, 1)
    for epoch in range(2):
        _set_sampler_epoch(sharded, epoch)
        assert indices(sharded) == [[2, 3], [6, 7], [9]]


def test_subclass_need_not_expose_its_arguments():
    sharded = shard(KeepsNothing("abc", range(10), 2), 1)
    assert isinstance(sharded, KeepsNothing) and sharded.secret_length == 3
    assert list(sharded) == [(2, 3), (6, 7), (9,)]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class TwoAndTwo(BatchSampler):
    pass


class UsersDistributedSampler(DistributedSampler):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=2),
        DataLoader(range(4), batch_size=None),
        DataLoader(range(4), batch_sampler=TwoAndTwo(SequentialSampler(range(4)), 2, False)),
        DataLoader(range(4), sampler=UsersDistributedSampler(range(4), num_replicas=2, rank=0)),
    ],
    ids=["iterable", "no automatic batching", "own batch sampler", "own distributed sampler"],
)
def test_loaders_that_divide_the_data_themselves_are_left_alone(loader):
    assert shard(loader) is loader
    assert replica_batch_sampler(loader) is None


def test_sharding_twice_changes_nothing():
    sharded = shard(DataLoader(range(10), batch_size=2), 1)
    assert shard(sharded, 1) is sharded
