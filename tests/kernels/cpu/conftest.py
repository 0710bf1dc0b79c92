from __future__ import annotations

import pytest
import torch

from kernels import cpu


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param
