"""What all tests have in common: which cases run when, and how many threads they take from each other."""

from __future__ import annotations

import os

import httpx
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests import sweeps

PATIENCE_S = 60.0  # of a call that names none: the client's own 5 s pass where a busy machine stands still

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of torch that wait for each other spin, and there are other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")

for name in httpx.Timeout(None).as_dict():
    setattr(DEFAULT_TIMEOUT_CONFIG, name, PATIENCE_S)


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps.mark_the_rest(items)
