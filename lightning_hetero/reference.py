"""One process without layouts: what a step's gradients are compared with.

An un-parallelised copy of a LightningModule runs the batches of all replicas, one after the other, and adds up their
gradients. It shares no boundary, no sharding and no reduction with what it is compared to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.errors import HeteroError
from lightning_hetero.schedule import declared_tokens, split_batch
from lightning_hetero.standin import loss_of


class NoDropout(TorchFunctionMode):
    """While it is open, torch's dropout and the dropout of its attention drop nothing, also in recomputations.

    Attributes:
        found: Whether anything would have been dropped.
    """

    # Function -> position and name of its probability, and of the flag that switches it on, if it has one.
    _DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
    _FUNCTIONS: Mapping[Any, tuple[tuple[int, str], tuple[int, str] | None]] = {
        **dict.fromkeys(_DROPOUTS, ((1, "p"), (2, "training"))),
        torch.dropout: ((1, "p"), (2, "train")),
        F.multi_head_attention_forward: ((10, "dropout_p"), (13, "training")),
        F.scaled_dot_product_attention: ((4, "dropout_p"), None),
    }

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.backward, torch.autograd.backward):
            # Tensor.backward calls its second argument gradient.
            grad_tensors = kwargs.pop("gradient", None)
            kwargs |= {} if grad_tensors is None else {"grad_tensors": grad_tensors}
            with self:  # while a function runs the mode is off, but what the backward recomputes must drop nothing
                return _run_backward(*args, **kwargs)
        if func in self._FUNCTIONS:
            probability, flag = self._FUNCTIONS[func]
            default = 0.5 if func.__name__.endswith("dropout") else 0.0
            if _argument(args, kwargs, probability, default) > 0 and (
                flag is None or _argument(args, kwargs, flag, True)
            ):
                self.found = True
                args, kwargs = _with_argument(args, kwargs, probability, 0.0)
        return func(*args, **kwargs)


def _run_backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """``torch.autograd.backward``, which itself would run with the function modes switched off."""
    outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors or (None,) * len(outputs)
    _engine_run_backward(
        outputs,
        tuple(torch.ones_like(t) if g is None else g for t, g in zip(outputs, given, strict=True)),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], where: tuple[int, str], default: Any) -> Any:
    position, name = where
    return args[position] if position < len(args) else kwargs.get(name, default)


def _with_argument(
    args: Sequence[Any], kwargs: dict[str, Any], where: tuple[int, str], value: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    position, name = where
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, kwargs | {name: value}


class LowestPrecision(TorchDispatchMode):
    """While it is open, watches for casts to a lower precision, as in a norm that computes in float32.

    Attributes:
        dtype: The least precise dtype that was cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_floating_point() and args[0].is_floating_point():
            self.dtype = coarsest(self.dtype, result.dtype)
        return result


def state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones once."""
    return [*module.named_parameters(), *module.named_buffers()]


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The least precise of some floating-point dtypes."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


class OneProcess:
    """A LightningModule as it was before it was parallelised, and what one process computes with it.

    Args:
        module: The LightningModule, before it is parallelised.

    Attributes:
        module: The copy. After :meth:`run` its parameters have the gradients of one process.
        dropout: Whether a step would have dropped something.
        draws: Whether a step drew random numbers other than for dropout.
        dtype: The least precise dtype that a step computed in.
    """

    def __init__(self, module: LightningModule) -> None:
        # Communicators cannot be copied, and one process has none.
        memo = {id(module._device_mesh): None} if module._device_mesh is not None else {}
        self.module = copy.deepcopy(module, memo)
        self.dropout = False
        self.draws = False
        self.dtype = torch.float64
        self._tokens = _Tokens()
        self._trainer: Any = None

    def build(self, trainer: Trainer, module: LightningModule, device: torch.device) -> None:
        """Does to the copy what a trainer does to a module before it trains in one process.

        Args:
            trainer: The trainer.
            module: The parallelised module.
            device: Where the one process computes.

        Raises:
            HeteroError: If the copy lacks a parameter or buffer of the parallelised module.
        """
        strategy = _InPlaceOf(
            trainer.strategy,
            runs_standin=False,
            token_count=self._tokens,
            root_device=device,
            **dict.fromkeys(("reduce", "all_gather", "broadcast", "barrier"), _refuse_to_communicate),
        )
        loggers = [DummyLogger() for _ in trainer.loggers]
        self._trainer = _InPlaceOf(
            trainer,
            strategy=strategy,
            lightning_module=self.module,
            model=self.module,
            loggers=loggers,
            logger=loggers[0] if loggers else None,
        )
        self.module.trainer = self._trainer
        self.module.log = self.module.log_dict = lambda *args, **kwargs: None  # type: ignore[assignment, method-assign]
        with trainer.precision_plugin.module_init_context():
            self.module.setup("fit")
            self.module.configure_model()
        trainer.precision_plugin.convert_module(self.module)
        if any(tensor.is_meta for tensor in (*self.module.parameters(), *self.module.buffers())):
            self.module.to_empty(device=device)
        self.module.to(device)
        missing = [name for name, _ in state_of(module) if name not in self._state]
        if missing:
            raise HeteroError(
                f"{type(module).__name__} has {', '.join(map(repr, missing[:3]))} when it trains, but not after "
                "__init__, setup() and configure_model(); build all submodules there"
            )

    @property
    def _state(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters(remove_duplicate=False)) | dict(
            self.module.named_buffers(remove_duplicate=False)
        )

    @torch.no_grad()
    def load(self, module: LightningModule, values: Iterator[Tensor]) -> None:
        """Takes over the state of the parallelised module.

        Args:
            module: The parallelised module.
            values: The global value of each tensor of :func:`state_of`.
        """
        state = self._state
        for name, tensor in state_of(module):
            state[name].copy_(next(values))
            if isinstance(tensor, nn.Parameter):
                state[name].requires_grad_(tensor.requires_grad)
        modes = {name: child.training for name, child in module.named_modules()}
        for name, child in self.module.named_modules():
            child.training = modes.get(name, child.training)

    def run(self, batches: Mapping[int, Sequence[Any]], *, microbatches: int = 1) -> list[list[float]]:
        """Computes ``(1/A) sum_a (1/R) sum_r d loss_ar / d parameter``, into the gradients of the copy.

        A replica's loss is the mean over its microbatches, which run one after the other. ``token_mean`` divides by the
        tokens of all replicas, which are counted first.

        Args:
            batches: ``batch_idx`` of each of the ``A`` batches that are accumulated, to the batches of the ``R``
                replicas; ``None`` for one that does not count.
            microbatches: How many a step cuts a batch into.

        Returns:
            The loss of each replica for each batch.
        """
        self.module.zero_grad(set_to_none=True)
        losses = []
        device = self.module.device
        with isolate_rng(), NoDropout() as mode, torch.enable_grad():
            before = _random_states(device)
            for batch_idx, of_replicas in batches.items():
                parts = [None if batch is None else self._split(batch, microbatches) for batch in of_replicas]
                declared = next((declared_tokens(self.module, b) for b in of_replicas if b is not None), None)
                self._tokens.start(microbatches, each=declared is None)
                with torch.no_grad(), LowestPrecision(self.dtype) as precision:
                    self._steps(batch_idx, parts)
                self.dtype = precision.dtype
                self._tokens.counted = True
                losses.append(self._steps(batch_idx, parts, share=len(batches) * len(of_replicas) * microbatches))
            after = _random_states(device)
        self.dropout |= mode.found
        self.draws |= not all(map(torch.equal, before, after))
        return losses

    def _split(self, batch: Any, microbatches: int) -> list[Any]:
        batch = move_data_to_device(batch, self.module.device)
        return [batch] if microbatches == 1 else split_batch(self.module, batch, microbatches)

    def _steps(self, batch_idx: int, parts: Sequence[list[Any] | None], share: int | None = None) -> list[float]:
        """Runs every microbatch of every replica, backwards too where ``share`` says by what to divide.

        Returns:
            The replicas' losses.
        """
        losses = []
        for of_replica in parts:
            total = 0.0
            for number, part in enumerate(of_replica or ()):
                self._tokens.begin(number)
                loss = self._step(part, batch_idx)
                if loss is None:
                    continue
                if share is not None:
                    (loss / share).backward()
                total += float(loss.detach()) / len(of_replica or ())
            losses.append(total)
        return losses

    def _step(self, batch: Any, batch_idx: int) -> Tensor | None:
        step = self.module.training_step
        arguments = {"batch_idx": batch_idx} if is_param_in_hook_signature(step, "batch_idx", min_args=2) else {}
        with self._trainer.precision_plugin.train_step_context():
            return loss_of(step(copy.deepcopy(batch), **arguments))  # a step may change its batch


class _Tokens:
    """What ``token_mean`` finds in one process: counts in a first pass, and the totals in a second one.

    The k-th call of one replica's step belongs to the k-th call of the others'.
    """

    def __init__(self) -> None:
        self.start(1, each=False)

    def start(self, microbatches: int, *, each: bool) -> None:
        """Begins a batch. ``each``: every microbatch has its own mean, since the step's tokens are not declared."""
        self.counted = False
        self._parts = 1 if each else microbatches
        self._each = each
        self._totals: dict[tuple[int, int], Tensor] = {}
        self.begin(0)

    def begin(self, microbatch: int) -> None:
        """Begins the step of a microbatch."""
        self._microbatch, self._call = microbatch, 0

    def add(self, tokens: Tensor) -> Tensor:
        """Counts, or returns what to divide by."""
        key = (self._microbatch if self._each else 0, self._call)
        self._call += 1
        if self.counted:
            return self._totals[key] / self._parts
        self._totals[key] = self._totals.get(key, torch.zeros_like(tokens)) + tokens
        return torch.ones_like(tokens)


class _InPlaceOf:
    """Everything as in another object, except for some attributes. What is set on it does not reach the other."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _refuse_to_communicate(*args: Any, **kwargs: Any) -> None:
    raise HeteroError(
        "training_step communicates with the other replicas (self.all_gather or trainer.strategy), but one process "
        "runs the replicas one after the other; besides token_mean, a step must compute its loss from its own batch"
    )


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
