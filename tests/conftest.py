from collections.abc import Iterator

import pytest

from tests.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight warm processes; started by the first test that asks for them."""
    with Pool(8) as workers:
        yield workers
