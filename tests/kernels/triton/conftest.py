"""On a machine without CUDA, Triton's interpreter runs the kernels; it has to be asked before they are imported."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


# The interpreter cuts bfloat16 off instead of rounding, and multiplies matrices of its bits.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def small_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs one program after the other, each as long as its arrays are large."""
    if not ON_GPU:
        monkeypatch.setattr("kernels.triton.decode_attention.ENOUGH_PROGRAMS", 16)
        monkeypatch.setattr("kernels.triton.filtered_sampling.BLOCK", 512)
        monkeypatch.setattr("kernels.triton.row_attention.SPLITS", 3)
