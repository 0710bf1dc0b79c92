"""Widely used client libraries, unchanged, against real processes; libraries that are not installed are skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.cluster import Cluster
from tests.e2e.faces.clients import TRIALS

DEVELOPMENT = ("openai", "anthropic")


@pytest.mark.parametrize("trial", [trial for library, trial in TRIALS if library in DEVELOPMENT])
def test_a_library_gets_what_it_expects(cluster: Cluster, trial: Callable[[str], None]) -> None:
    trial(f"http://{cluster.http_address}")
