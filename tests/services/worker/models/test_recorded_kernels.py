"""The first start on a machine compiles in advance what its graphs call."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama3-8b", "qwen3-30b-a3b"])
def test_no_kernel_of_a_graph_is_forgotten(shape: str) -> None:
    command = [sys.executable, "-m", "tests.services.worker.models.recorded_kernels", shape]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, check=True, timeout=100, stdout=subprocess.PIPE)
    kernels = json.loads(done.stdout)
    assert {"_decode_attention", "_shared_prefix", "_chunk_attention", "_row_linear"} <= set(kernels["called"])
    if shape == "qwen3-30b-a3b":
        assert {"_route", "_grouped_linear", "_row_experts_down"} <= set(kernels["called"])
    assert kernels["forgotten"] == []
