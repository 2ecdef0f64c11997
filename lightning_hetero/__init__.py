"""Heterogeneous parallelism for multimodal models in PyTorch Lightning.

Importing the package registers the strategy: ``Trainer(strategy="hetero")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero.errors import BoundaryError, HeteroError, LayoutError, PlanError
from lightning_hetero.gradients import token_mean
from lightning_hetero.layout import ModuleLayout
from lightning_hetero.strategy import HeteroStrategy

__version__ = "0.1.0"
__all__ = [
    "BoundaryError",
    "HeteroError",
    "HeteroStrategy",
    "LayoutError",
    "ModuleLayout",
    "PlanError",
    "token_mean",
]

if "hetero" not in StrategyRegistry:
    StrategyRegistry.register(
        "hetero", HeteroStrategy, description="Each module in a parallel layout of its own", override=False
    )
