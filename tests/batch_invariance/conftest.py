"""Asks for Triton's interpreter, where there is no GPU, before anything here imports Triton."""

from tests.kernels.triton.conftest import ON_GPU

__all__ = ["ON_GPU"]
