from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads():
    """Sets the pool's threads as requested and torch's to one: on a busy machine torch's threads mostly wait for each
    other."""
    ours, theirs = cpu.num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(theirs)
    cpu.set_num_threads(ours)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param
