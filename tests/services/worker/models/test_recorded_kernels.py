"""The first start on a machine compiles in advance all kernels of its graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ATTENTION = {"_decode_attention", "_shared_prefix", "_chunk_attention", "_row_linear"}
EXPERTS = {"_route", "_grouped_linear"}
CALLED = {
    "llama3-8b adapters": ATTENTION | {"_shrink", "_pick", "_expand", "_row_low_rank"},
    "qwen3-30b-a3b": ATTENTION | EXPERTS | {"_row_experts_down"},
    "deepseek-v2-lite": EXPERTS | {"_latent_attention", "_latent_store", "_combine"},
    "qwen3-0.6b": ATTENTION,
    "qwen3-0.6b trees": ATTENTION,
    "llama3-8b": ATTENTION,
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", CALLED)
def test_no_kernel_of_a_graph_is_forgotten(shape: str) -> None:
    command = [sys.executable, "-m", "tests.services.worker.models.recorded_kernels", *shape.split()]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    kernels = json.loads(done.stdout)
    assert CALLED[shape] <= set(kernels["called"])
    assert kernels["forgotten"] == []
