"""HeteroStrategy: the Lightning contract. Thin: planning, boundaries and gradients live in their own files."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed, _sync_ddp_if_available
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_hetero.boundary.call import Boundary, place
from lightning_hetero.boundary.exchange import Transport
from lightning_hetero.boundary.rendezvous import Rendezvous
from lightning_hetero.boundary.specs import find_spec
from lightning_hetero.data import replica_batch_sampler, shard_dataloader
from lightning_hetero.errors import HeteroError, LayoutError
from lightning_hetero.gradients import (
    GradientNorm,
    GradientSync,
    Reduction,
)
from lightning_hetero.layout import FLATTENED_AXES, Layouts, ModuleLayout, resolve_layouts, show
from lightning_hetero.logged import reduce_logged_values_over
from lightning_hetero.mesh import ProcessGroups, build_meshes, create_groups
from lightning_hetero.parallelize.apply import (
    ModulePlan,
    agree_on_weights,
    innermost_first,
    materialize,
    parallelize,
    partial_parameters,
    plan_modules,
)
from lightning_hetero.parallelize.data import reduce_gathered_gradients, uses_fsdp
from lightning_hetero.placement import configured_layouts, find_layouts, parameters_by_module
from lightning_hetero.precision import extend_precision, fsdp_policy, scale_loss
from lightning_hetero.report import print_layout
from lightning_hetero.rng import RandomStreams, merge_states
from lightning_hetero.schedule import TokenCount, declared_tokens, split_batch
from lightning_hetero.standin import is_standin, leave_no_trace, loss_of, weightless, with_loss
from lightning_hetero.uneven import agree_on_end, check_same_data

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

STREAMS_KEY = "random_streams"
"""Where a checkpoint has the random streams of all modules."""


class HeteroStrategy(ModelParallelStrategy):
    """Trains a LightningModule whose submodules have parallel layouts of their own.

    ``training_step`` runs in the layout of one module, the driver. Calling any other placed module crosses a
    boundary: its inputs are carried into that module's layout and its outputs back, and gradients take the same way.

    Args:
        layouts: Layouts by a short name. ``None`` takes the LightningModule's ``configure_layouts()``, or else shards
            every child with FSDP2 over all ranks.
        driver: Name of the driver. Default: the only layout, or the one named ``llm``, ``language_model`` or
            ``text_model``.
        microbatches: Slices of each batch that a step runs one after the other.
        microbatches_per_encode: How many of them one encoder pass takes.
        max_in_flight: How many encoder passes may be ahead of the driver.
        balance: How items are spread over a module's replicas.
        data_loading: Whether every rank loads its replica's data, or one of them for all.
        save_distributed_checkpoint: Save one directory with a file from each rank, instead of a single file.
        process_group_backend: Of the default process group; the default fits the accelerator.
        timeout: Of the process groups.

    Raises:
        LayoutError: From ``Trainer.fit`` and the like, before any weight is touched, if the layouts cannot be placed.
    """

    def __init__(
        self,
        layouts: dict[str, ModuleLayout] | None = None,
        driver: str | None = None,
        microbatches: int = 1,
        microbatches_per_encode: int | Literal["all"] = 1,
        max_in_flight: int = 2,
        balance: Literal["none", "replica", "global"] = "replica",
        data_loading: Literal["every_rank", "one_per_replica"] = "every_rank",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        for name, value, supported in (
            ("microbatches_per_encode", microbatches_per_encode, (1,)),
            ("balance", balance, ("none", "replica", "global")),
            ("data_loading", data_loading, ("every_rank",)),
        ):
            if value not in supported:
                raise LayoutError(f"strategy.{name}={value!r} is not supported by this version; remove it")
        if not isinstance(microbatches, int) or microbatches < 1:
            raise LayoutError(f"strategy.microbatches must be a whole number from 1 up, got {microbatches!r}")
        self.layout_config = layouts
        self.microbatches = microbatches
        self.balance = balance
        self.token_count: TokenCount | None = None
        self.driver_config = driver
        self.layouts: Layouts | None = None
        self.meshes: Mapping[str, DeviceMesh] = {}
        self.boundaries: dict[str, Boundary] = {}
        self._groups: ProcessGroups | None = None
        self._transport: Transport | None = None
        self._checks_data = True
        self._rendezvous: Rendezvous | None = None
        self._sync: GradientSync | None = None
        self._streams: RandomStreams | None = None
        self._norm = GradientNorm({})
        self._fsdp_roots: list[FSDPModule] = []
        self._parallelized: nn.Module | None = None
        self._in_step = False
        self._shards_loaders = True
        self._blocks_sync = False
        self._step_gradients: dict[nn.Parameter, Tensor] | None = None

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Starts the process group, validates the layouts and builds every module's mesh, in one order."""
        module = self.lightning_module
        assert module is not None
        configured = configured_layouts(module, self.layout_config)
        # Lightning's launcher does this on the rank that launches; the others would each start a thread for every core.
        _set_num_threads_if_needed(num_processes=self.num_processes)
        self._setup_distributed()
        if self._parallelized is module:
            return
        # Loaders are sharded in process_dataloader, where the user's own sampler and shuffling are still there to see.
        connector = module.trainer._accelerator_connector
        self._shards_loaders = self._shards_loaders and connector.use_distributed_sampler
        connector.use_distributed_sampler = False
        self.layouts = None
        if configured is not None or any(True for _ in module.parameters()):
            self._build_meshes(module)

    def _build_meshes(self, module: LightningModule) -> None:
        """Resolves the layouts and creates all process groups. Collective over the world."""
        configured = configured_layouts(module, self.layout_config)
        if configured is None:
            self.layouts = find_layouts(module, None, self.driver_config, self.world_size)
        else:  # the modules themselves may come with configure_model(), so their paths are checked in setup()
            self.layouts = resolve_layouts(configured, self.driver_config, self.world_size)
        everyone = tuple(range(self.world_size))
        for layout in self.layouts.by_name.values():
            if set(layout.ranks) != set(everyone):
                raise LayoutError(
                    f"layouts.{layout.name}.ranks: this version places every module on all ranks ({show(everyone)}), "
                    f"got {show(layout.ranks)}; remove the field"
                )
        self._groups = create_groups(self.layouts, timeout=self._timeout)
        self._groups.touch(self.root_device)
        self._transport = Transport(self._groups[everyone], self._groups.host)
        self.meshes = build_meshes(self.layouts, self._groups, self.root_device.type)
        self._device_mesh = self.meshes[self.layouts.driver_name]
        module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        """Parallelises the placed modules, puts boundaries around them, and sets up the optimizers."""
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self._checks_data = True  # the first batch of every run
        fit_loop = trainer.fit_loop.epoch_loop
        for loop in (fit_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # FSDP2 cannot use parameters that it gathered under inference mode, then or in a later fit.
            loop.inference_mode = False
        for logging in (fit_loop, fit_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            reduce_logged_values_over(lambda: self.data_parallel_group, logging)
        if self._parallelized is not module:
            self._parallelize(module)
        for metric in module.modules():
            # States are summed over driver replicas, not over the tensor copies of each.
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self.data_parallel_group
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _parallelize(self, module: LightningModule) -> None:
        if self.layouts is None:
            self._build_meshes(module)
        layouts, groups = self.layouts, self._groups
        assert layouts is not None and groups is not None
        plans = plan_modules(module, layouts)
        if self.global_rank == 0:
            print_layout(module, layouts)
        partial = {name: partial_parameters(plan) for name, plan in plans.items()}
        materialize(module, self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        agree_on_weights(module, layouts, groups)
        # Ranks may be seeded differently; streams that must agree may not.
        seed = torch.tensor([torch.initial_seed() % 2**63])
        dist.broadcast(seed, src=0, group=groups.host)
        self._streams = RandomStreams(layouts, self.global_rank, int(seed), self.root_device)
        policy = fsdp_policy(self.precision_plugin)
        for plan in innermost_first(plans):
            parallelize(plan, self.meshes[plan.layout.name], policy, self._streams[plan.layout.name])
        owned = parameters_by_module(module, layouts)
        self._sync = self._plan_sync(owned, partial)
        layout_of = {
            parameter: layouts.by_name[name] if name else layouts.driver
            for name, parameters in owned.items()
            for parameter in parameters.values()
        }
        self._fsdp_roots = [plan.module for plan in plans.values() if isinstance(plan.module, FSDPModule)]
        self._norm = GradientNorm(layout_of, dist.group.WORLD if self.world_size > 1 else None)
        extend_precision(self.precision_plugin, self._norm, self.root_device)
        self._place(plans)
        self._parallelized = module

    def _place(self, plans: Mapping[str, ModulePlan]) -> None:
        """Puts boundaries around the placed modules, and makes ranks meet before the driver's first collectives."""
        layouts, groups = self.layouts, self._groups
        assert layouts is not None and groups is not None and self._streams is not None
        assert self.lightning_module is not None
        self.boundaries, self._rendezvous = {}, None
        if not layouts.others:
            return
        assert self._transport is not None
        rendezvous = self._rendezvous = Rendezvous(self._transport, meets=layouts.driver.data_size > 1)
        for layout in layouts.others:
            transport = Transport(groups[layouts.driver.ranks], groups.host)
            module = plans[layout.name].module
            boundary = Boundary(
                layout,
                layouts.driver,
                transport,
                rendezvous,
                self.global_rank,
                self._streams[layout.name],
                find_spec(module, layout.name, self.lightning_module),
                layout.config.balance or self.balance,
            )
            place(module, boundary, self.root_device)
            self.boundaries[layout.name] = boundary
        if uses_fsdp(layouts.driver):  # its collectives span replicas
            driver = plans[layouts.driver_name]
            rendezvous.watch(driver.module, [driver.module.get_submodule(path) for path in driver.units])

    def _plan_sync(
        self, owned: Mapping[str, Mapping[str, nn.Parameter]], partial: Mapping[str, list[str]]
    ) -> GradientSync:
        """Which gradients are summed over which group once a backward is done, besides what FSDP2 reduces."""
        layouts = self.layouts
        assert layouts is not None and self._groups is not None
        over_tensor, over_replicas = [], []
        for name, parameters in owned.items():
            layout = layouts.by_name[name] if name else layouts.driver
            trainable = {path: p for path, p in parameters.items() if p.requires_grad}
            paths = {f"{layout.path}.{path}" for path in partial.get(name, ())}
            summed = {path: p for path, p in trainable.items() if path in paths}
            if summed:
                over_tensor.append(Reduction(summed, self._groups.of(layout, ["tensor_parallel"])))
            if trainable and layout.data_size > 1 and not (name and uses_fsdp(layout)):
                over_replicas.append(Reduction(trainable, self._groups.of(layout, FLATTENED_AXES["data_parallel"])))
        return GradientSync(over_tensor, over_replicas, self._groups.host)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, which must hold the parallelised parameters.

        Raises:
            HeteroError: If an optimizer holds a parameter that the model no longer has.
        """
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        known = set(self.lightning_module.parameters())
        for optimizer in self.optimizers:
            if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
                raise HeteroError(
                    f"{type(optimizer).__name__} holds parameters that the model no longer has: it was built before "
                    "the modules were sharded, so its steps would change nothing. Build it in "
                    "configure_optimizers() from "
                    "self.parameters(), or take an OptimizerCallable in the LightningModule's __init__"
                )

    # ------------------------------------------------------------------ who am I

    @property
    def is_driver_rank(self) -> bool:
        """Whether this rank runs the user's steps."""
        return self.layouts is None or self.global_rank in self.layouts.driver

    @property
    def loader_rank(self) -> int:
        """Which share of the data this rank loads: its driver replica."""
        assert self.layouts is not None
        return self.layouts.driver.replica_of(self.global_rank)

    @property
    def loader_world_size(self) -> int:
        """Number of shares of the data: the driver's replicas."""
        assert self.layouts is not None
        return self.layouts.driver.data_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """One rank of each driver replica, this rank among them."""
        assert self.layouts is not None and self._groups is not None
        return self._groups.of(self.layouts.driver, FLATTENED_AXES["data_parallel"])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.loader_world_size, "rank": self.loader_rank}

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Gives a map-style loader this replica's share of every global batch.

        Loaders that divide the data themselves stay as they are, but stop on all ranks together: training with the
        first that ends, evaluation with the last.
        """
        assert self.lightning_module is not None and self._transport is not None
        if isinstance(dataloader, DataLoader) and self._shards_loaders:
            dataloader = shard_dataloader(
                dataloader,
                num_replicas=self.loader_world_size,
                replica=self.loader_rank,
                seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            )
        if replica_batch_sampler(dataloader) is not None or self.loader_world_size == 1:
            return dataloader
        if not isinstance(dataloader, Iterable):
            return dataloader
        return agree_on_end(dataloader, self._transport, drain=not self.lightning_module.trainer.training)

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the user's step, once for each microbatch; its loss requires a gradient on all ranks if it does on any.

        With microbatches the backwards run in here, one after the other, and :meth:`backward` takes their gradients.
        """
        assert self.lightning_module is not None
        step = super().training_step
        if self.microbatches == 1 or not self.lightning_module.automatic_optimization:
            return self._run_step(step, *args, **kwargs)
        return self._run_microbatches(step, *args, **kwargs)

    def _run_microbatches(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, sync = self.lightning_module, self._sync
        assert module is not None and sync is not None
        parts = split_batch(module, batch, self.microbatches)
        # Lightning clears gradients after this step and before the backward: until then they are set aside.
        before = {parameter: parameter.grad for parameter in module.parameters()}
        for parameter in before:
            parameter.grad = None
        self.token_count = self._declare_tokens(batch)
        share = self.microbatches * self.loader_world_size * module.trainer.accumulate_grad_batches
        total = torch.zeros((), device=self.root_device)
        try:
            for number, part in enumerate(parts):
                loss = loss_of(self._run_step(step, part, *args, **kwargs))
                if loss is None:
                    raise HeteroError(
                        f"strategy.microbatches={self.microbatches} needs a loss from every training_step, got None"
                    )
                total = total + loss.detach() / self.microbatches
                last = number == self.microbatches - 1
                with self._gradient_sync(last and not self._blocks_sync):
                    if not loss.requires_grad:
                        continue  # on no rank: nothing in this microbatch leads to a trainable parameter
                    self.precision_plugin.backward(scale_loss(self.precision_plugin, loss / share), module, None)
            if self.token_count is not None and not self.runs_standin:
                self.token_count.check()
        finally:
            self.token_count = None
            self._step_gradients = {p: p.grad for p in before if p.grad is not None}
            for parameter, gradient in before.items():
                parameter.grad = gradient
        return total.requires_grad_()

    def _declare_tokens(self, batch: Any) -> TokenCount | None:
        """Agrees on the tokens of the step before its first microbatch runs."""
        tokens = declared_tokens(self.lightning_module, batch)
        if tokens is None:
            return None
        exact = torch.float64 if self.root_device.type == "cpu" else torch.float32
        declared = torch.as_tensor(0 if self.runs_standin else tokens, device=self.root_device, dtype=exact)
        total = declared.clone()
        if self.loader_world_size > 1:
            dist.all_reduce(total, group=self.data_parallel_group)
        return TokenCount(self.microbatches, declared, total)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._run_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._run_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step; a replica without samples of its own returns ``None``."""
        output = self._run_step(super().predict_step, *args, **kwargs)
        return None if self.runs_standin else output

    def _run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a user's step. In it, collectives without a group mean the driver's data-parallel group."""
        assert self.lightning_module is not None
        assert self.layouts is not None and self._streams is not None and self._transport is not None
        if self._checks_data and self.world_size > 1:
            self._checks_data = False
            check_same_data(args[0], self.layouts.driver, self._transport)
        rendezvous = self._rendezvous
        self._in_step = True
        try:
            with self._streams[self.layouts.driver_name].running():
                if rendezvous is not None:
                    rendezvous.begin_step()
                if self.runs_standin:
                    with leave_no_trace(self.lightning_module, self.lightning_module.trainer._results):
                        output = weightless(step(*args, **kwargs))
                else:
                    output = step(*args, **kwargs)
                if rendezvous is None:
                    return output
                loss = loss_of(output) if self.lightning_module.trainer.training else None
                return with_loss(output, rendezvous.end_step(loss))
        finally:
            self._in_step = False

    @property
    def runs_standin(self) -> bool:
        """Whether the current batch holds no sample of this replica's own, so that nothing of its step counts."""
        assert self.lightning_module is not None
        return is_standin(self.lightning_module.trainer)

    # ------------------------------------------------------------------ backward

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward of ``loss / R`` with ``R`` driver replicas, then sums what FSDP2 does not."""
        module, sync = self.lightning_module, self._sync
        assert module is not None and sync is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        sync.before_backward()
        if self._step_gradients is not None:
            for parameter, gradient in self._step_gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._step_gradients = None
        else:
            with self._gradient_sync(not self._blocks_sync):
                loss = closure_loss / self.loader_world_size
                self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        sync.after_backward(module.parameters(), reduce=not self._blocks_sync)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients accumulate over batches, nothing is reduced: FSDP2 and we wait for the last batch."""
        self._blocks_sync = True
        try:
            yield
        finally:
            self._blocks_sync = False

    @contextmanager
    def _gradient_sync(self, enabled: bool) -> Generator[None, None, None]:
        """Whether FSDP2 reduces the gradients of the backward that runs meanwhile, and those gathered before it."""
        for root in self._fsdp_roots:
            root.set_requires_gradient_sync(enabled)
            root.set_is_last_backward(enabled)
        yield
        if enabled:
            for root in self._fsdp_roots:
                reduce_gathered_gradients(root)

    def gradient_norm(self, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of the whole model, or of some parameters, with every element counted once.

        Collective over the world: to be called on all ranks, with the same parameters.

        Args:
            parameters: Default: all of the LightningModule's.
            norm_type: Of the p-norm; may be ``inf``.

        Returns:
            A scalar tensor, equal on all ranks.
        """
        assert self.lightning_module is not None
        parameters = self.lightning_module.parameters() if parameters is None else parameters
        return self._norm.total(parameters, self.root_device, norm_type)

    # ------------------------------------------------------------------ collectives

    def meet(self) -> None:
        """Lets ranks join the encoder calls of others before a collective over replicas in the user's step."""
        if self._in_step and self._rendezvous is not None:
            self._rendezvous.meet()

    def _default_group(self, group: Any | None) -> Any | None:
        self.meet()
        return self.data_parallel_group if group is None and self._in_step else group

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks; inside a step for the ranks of the driver's data-parallel group."""
        if self._in_step:
            self.meet()
            dist.barrier(group=self.data_parallel_group)
        else:
            super().barrier(name)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces over ``group``: by default the driver's replicas inside a step, the world outside."""
        if not isinstance(tensor, Tensor):
            return tensor
        if reduce_op == "mean" and not tensor.is_floating_point():
            tensor = tensor.double()  # the mean of whole numbers (batch sizes) need not be one
        return _sync_ddp_if_available(tensor, self._default_group(group), reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers over ``group``: by default the driver's replicas inside a step, the world outside."""
        return super().all_gather(tensor, group=self._default_group(group), sync_grads=sync_grads)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint with the random streams of all ranks. Collective over the world."""
        if self._streams is not None and self._groups is not None:
            states: list[Any] = [None] * self.world_size
            dist.all_gather_object(states, self._streams.state_dict(), group=self._groups.host)
            checkpoint[STREAMS_KEY] = merge_states(states)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads weights, optimizer states and random streams. Collective over the world."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if STREAMS_KEY in checkpoint and self._streams is not None:
            self._streams.load_state_dict(checkpoint[STREAMS_KEY])
        return checkpoint

    def teardown(self) -> None:
        super().teardown()
