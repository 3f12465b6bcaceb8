from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()
