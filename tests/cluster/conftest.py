"""One cluster of three nodes for the tests that leave it with as many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, cluster


@pytest.fixture(scope="package")
def ray() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made
