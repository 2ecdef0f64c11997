"""Everything a worker needs, imported once in the process that workers are forked from.

A failed import is not an error here: whoever needs the package meets the same error, with a traceback, in its own code.
"""

import contextlib
import gc
import importlib

MODULES = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "lightning.pytorch.cli",
    "lightning.pytorch.strategies",
    "lightning_hetero",
)

for name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(name)

# What was imported so far lives for ever: a worker's collector need not look at it (and copy its pages).
gc.collect()
gc.freeze()
