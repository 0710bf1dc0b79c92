"""Common fixtures of the Triton kernel tests."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import ON_GPU
from tests.kernels.triton.tuned import tune


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


# The interpreter truncates bfloat16 instead of rounding, and multiplies matrices of its bits.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def small_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces tuning constants: the interpreter runs programs one after the other, at a cost by array size."""
    if not ON_GPU:
        tune(monkeypatch, "attention.decode_attention", enough_programs=16)
        tune(monkeypatch, "attention.latent_blocks", enough_programs=12)
        tune(monkeypatch, "sampling.filtered_sampling", block=512)
        tune(monkeypatch, "single_row.row_attention", splits=3)
