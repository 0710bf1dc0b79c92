"""Quantized checkpoints on CUDA, in bfloat16, against transformers with the dequantized floats.

Run on a GPU machine: pytest -m gpu. Bounds of the error's norm relative to the logits': 0.04 for bfloat16 alone, 0.12
with 8-bit activations (each product is then off by 1 % in int8, 2.6 % in FP8).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.services.worker.layers.quantization import layouts as quantized
from tests.services.worker.layers.quantization.layouts import LAYOUTS
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import SINGLE_ROW_SIZES

pytestmark = pytest.mark.gpu

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
IN_16_BITS, IN_8_BITS = 0.04, 0.12
ACTIVATIONS = ("fp8-blocks", "fp8-tensor", "ct-fp8-channel", "ct-int8")
# Static scales do not suit these random activations.
ROUGH = ("fp8-static", "ct-fp8-static")


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - set(ROUGH)))
def test_logits(layout: str, graphs: bool, tmp_path: Path) -> None:
    made = quantized.make(LAYOUTS[layout], tmp_path)
    settings = {"attention_backend": "auto", "block_size": 16, "cuda_graphs": graphs}
    rig = Rig(tmp_path, device="cuda", dtype="bfloat16", **settings)
    rig.step([New(0, PROMPT), New(1, PROMPT[:3])], {0: 8, 1: 3})
    for count in (3, 1, 1):
        rig.step(counts={0: count})
    bound = IN_8_BITS if layout in ACTIVATIONS else IN_16_BITS
    for slot in (0, 1):
        rows, tokens = torch.stack(rig.logits[slot]), rig.tokens(slot)
        want = made.logits(tokens)[len(tokens) - len(rows) - 1 : -1]
        assert float((rows - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("layout", ["fp8-tensor", "ct-fp8-channel", "ct-int8", "awq", "gptq", "ct-w4-32"])
def test_a_single_row_in_the_chain_of_fused_kernels(layout: str, tmp_path: Path) -> None:
    made = quantized.make(LAYOUTS[layout], tmp_path, **SINGLE_ROW_SIZES)
    settings = {"attention_backend": "auto", "block_size": 16, "cuda_graphs": True}
    rig = Rig(tmp_path, device="cuda", dtype="bfloat16", **settings)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    for _ in range(3):
        rig.step(counts={0: 1})
    rows, tokens = torch.stack(rig.logits[0]), rig.tokens(0)
    want = made.logits(tokens)[len(tokens) - len(rows) - 1 : -1]
    bound = IN_8_BITS if layout in ACTIVATIONS else IN_16_BITS
    assert float((rows - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("layout", ROUGH)
def test_static_scales_are_those_of_the_checkpoint(layout: str, tmp_path: Path) -> None:
    quantized.make(LAYOUTS[layout], tmp_path)
    rig = Rig(tmp_path, device="cuda", dtype="bfloat16", attention_backend="auto", block_size=16)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    assert torch.isfinite(rig.logits[0][0]).all()
