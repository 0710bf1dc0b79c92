"""Fixtures of ranks on GPUs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
