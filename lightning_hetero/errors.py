"""Errors that a user can act on: what was expected, what was given, the config key, and what to change."""


class HeteroError(Exception):
    """Base class of every error that lightning_hetero raises on purpose."""


class LayoutError(HeteroError, ValueError):
    """A :class:`~lightning_hetero.ModuleLayout`, or a set of them, that cannot be placed."""


class PlanError(HeteroError, ValueError):
    """A tensor-parallel plan or an FSDP unit pattern that does not fit the module."""


class BoundaryError(HeteroError, RuntimeError):
    """A call of a placed module whose inputs or outputs cannot cross the boundary."""
