"""Kernels compiled ahead: each kernel's own calls, from all modules whose kernels graphs launch."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import quire.kernels.triton
from quire.kernels.triton.precompile.calls import MODULES, PACKAGE
from tests.kernels.triton.precompile import launches

FOLDER = Path(quire.kernels.triton.__file__).parent
LAUNCH = re.compile(r"^ +_\w+\[.*\]\(", re.MULTILINE)
CONSTANT = re.compile(
    r"^ +(?:num_warps|num_stages|STAGES|TILE|ROWS|BLOCK|COLUMNS|DEPTH)=(?:[2-9]|\d\d+)\b", re.MULTILINE
)
STORED = json.loads(launches.STORED.read_text())

# Used by few models or settings: compiled at their first call.
AT_FIRST_CALL = {
    "attention.ragged_attention",
    "attention.rotate_pairs",
    "normed_sums",
    "quantization.eight_bit_activations",
    "quantization.eight_bit_linear",
    "rank_sums",
    "recurrent.gated_delta_rule",
    "recurrent.gated_norm",
    "recurrent.short_convolution",
    "two_shot_sums",
}
# Reached by the calls of other modules.
BY_OTHERS = {
    "moe.grouped_linear",
    "quantization.packed_many_rows",
    "quantization.packed_warp_groups",
    "quantization.split_sums",
    "sampling.bounded_sampling",
    "single_row.row_narrow",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts)


def sources() -> dict[str, str]:
    return {name_of(path): path.read_text() for path in FOLDER.rglob("*.py")}


def test_every_launching_module_declares_its_precompilation() -> None:
    launching = {name for name, text in sources().items() if LAUNCH.search(text)}
    assert launching <= {*MODULES, *AT_FIRST_CALL, *BY_OTHERS}
    assert launching >= AT_FIRST_CALL | BY_OTHERS


def test_every_module_with_calls_is_listed_once() -> None:
    with_calls = sorted(name for name, text in sources().items() if "def precompile_calls" in text)
    assert with_calls == sorted([*MODULES, "precompile.calls"])


@pytest.mark.parametrize("name", MODULES)
def test_constants_of_a_kernel_are_rows_of_a_table(name: str) -> None:
    """No launch sets its own number of warps or stages."""
    text = Path(importlib.import_module(f"{PACKAGE}.{name}").__file__ or "").read_text()
    assert not CONSTANT.findall(text)


@pytest.mark.slow
@pytest.mark.skipif(launches.triton_version() != STORED["triton"], reason="stored for another Triton")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_are_compiled_for_what_was_stored(capability: int) -> None:
    """After an intended change, update the record: `python -m tests.kernels.triton.precompile.launches --write`."""
    assert launches.summary(launches.recorded(capability)) == STORED["kernels"][str(capability)]
