"""What all tests have in common: which cases run when, and how many threads they take from each other."""

from __future__ import annotations

import os

import pytest

from tests import sweeps

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of torch that wait for each other spin, and there are other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps.mark_the_rest(items)
