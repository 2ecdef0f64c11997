"""Layouts to DeviceMeshes, on process groups that are created once, in one order, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_hetero.layout import FLATTENED_AXES, MESH_AXES, Layouts, ResolvedLayout, process_groups


class ProcessGroups:
    """Every process group that a set of layouts needs: one for each distinct set of ranks.

    All ranks create all groups in the same order, as ``torch.distributed.new_group`` requires. Sets with one member
    share a group of the ``fake`` backend, whose collectives are local: no communicator is ever set up for them.

    Args:
        rank_sets: The sets, in the order of creation (:func:`~lightning_hetero.layout.process_groups`).
        timeout: Of the collectives; ``None`` is the backend's default.

    Attributes:
        host: A CPU-side group of the world, for counts and flags. Where the world's own group runs on the CPU it
            serves for both.
    """

    def __init__(self, rank_sets: list[tuple[int, ...]], *, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        world = tuple(range(dist.get_world_size()))
        default = dist.distributed_c10d._get_default_group()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {world: default}
        for ranks in rank_sets:
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if len(world) > 1:
            self._groups[(self.rank,)] = dist.new_group([self.rank], backend="fake")
        on_cpu = "gloo" in dist.get_backend()
        self.host: dist.ProcessGroup = default if on_cpu else dist.new_group(backend="gloo", timeout=timeout)

    def __getitem__(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return self._groups[tuple(sorted(ranks))]

    def of(self, layout: ResolvedLayout, axes: Iterable[str]) -> dist.ProcessGroup:
        """This rank's group along some axes of a layout."""
        return self[next(ranks for ranks in layout.groups(axes) if self.rank in ranks)]

    def touch(self, device: torch.device) -> None:
        """Runs one collective in each group, so that no communicator is set up inside a skewed schedule."""
        for ranks, group in self._groups.items():
            if self.rank in ranks and len(ranks) > 1:
                dist.all_reduce(torch.zeros(1, device=device), group=group)


def build_mesh(layout: ResolvedLayout, groups: ProcessGroups, device_type: str) -> DeviceMesh:
    """One module's DeviceMesh, with the axes of :data:`~lightning_hetero.layout.MESH_AXES` and the flattened ones.

    Equal to ``init_device_mesh`` and ``_flatten``, but on shared groups and also on ranks outside the mesh.
    """
    mesh = DeviceMesh(
        device_type,
        torch.tensor(layout.ranks, dtype=torch.int).view(layout.sizes),
        mesh_dim_names=MESH_AXES,
        _init_backend=False,
    )
    _attach(mesh, [[axis] for axis in MESH_AXES], layout, groups)
    if groups.rank not in layout:
        return mesh
    for name, axes in FLATTENED_AXES.items():
        flat = mesh[axes]
        flat = DeviceMesh(
            device_type,
            _layout=type(flat._layout)([flat._layout.collapse()]),
            _rank_map=mesh._rank_map,
            mesh_dim_names=(name,),
            _root_mesh=mesh,
            _init_backend=False,
        )
        _attach(flat, [axes], layout, groups, registry=mesh)
        mesh._flatten_mapping[name] = flat
    return mesh


def build_meshes(layouts: Layouts, groups: ProcessGroups, device_type: str) -> Mapping[str, DeviceMesh]:
    """The DeviceMesh of every placed module, on every rank."""
    return {name: build_mesh(layout, groups, device_type) for name, layout in layouts.by_name.items()}


def create_groups(layouts: Layouts, timeout: timedelta | None = None) -> ProcessGroups:
    """Creates the process groups of all layouts. Collective over the world."""
    return ProcessGroups(process_groups(layouts), timeout=timeout)


def _attach(
    mesh: DeviceMesh,
    axes: Sequence[Iterable[str]],
    layout: ResolvedLayout,
    groups: ProcessGroups,
    registry: DeviceMesh | None = None,
) -> None:
    """Gives a mesh that was built without a backend this rank's groups."""
    mesh._dim_group_names = []
    if groups.rank not in layout:
        return
    for varying in axes:
        group = groups.of(layout, varying)
        mesh._dim_group_names.append(group.group_name)
        (registry or mesh)._pg_registry[group.group_name] = group
