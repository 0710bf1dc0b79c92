"""Recurrent layers on two GPUs, in CUDA graphs and without. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

import pytest

from tests.services.worker.ranks.test_states import CASES, Make, by_one, by_ranks, check, made
from tests.services.worker.test_cuda import WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

__all__ = ["made"]

ways = pytest.mark.parametrize("way", ["eager", *(way for way in WAYS if "graphs" in way)])
MIXTURES = ("qwen3-next", "granite-hybrid-experts")


@ways
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_match_one(made: Make, name: str, way: str) -> None:
    settings = {"device": "cuda", **WAYS[way]}
    check(by_ranks(made(name), **settings), by_one(made(name), **settings))


@ways
@pytest.mark.parametrize("name", CASES)
def test_two_stages_match_one(made: Make, name: str, way: str) -> None:
    settings = {"device": "cuda", **WAYS[way]}
    check(by_ranks(made(name), 1, 2, **settings), by_one(made(name), **settings))


@ways
@pytest.mark.parametrize("backend", ["allreduce", "alltoall"])
@pytest.mark.parametrize("name", MIXTURES)
def test_expert_parallel_gpus_match_one(made: Make, name: str, backend: str, way: str) -> None:
    settings = {"device": "cuda", **WAYS[way]}
    found = by_ranks(made(name), expert_parallel=True, all2all_backend=backend, **settings)
    check(found, by_one(made(name), **settings))
