"""What the tests share: a pool of worker processes that stand in for ranks."""

from tests.harness.pool import Pool, WorkerError

__all__ = ["Pool", "WorkerError"]
