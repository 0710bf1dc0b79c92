"""Enables Triton's interpreter on machines without a GPU before any test module imports Triton."""

from tests.kernels.triton.conftest import ON_GPU

__all__ = ["ON_GPU"]
