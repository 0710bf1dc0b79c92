"""Checkpoints written by `quire quantize` load and give nearly the answers of the floats."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import TINY

# Bounds of the errors of weights and of logits: norms of differences relative to exact values.
BOUNDS = {"fp8": (0.03, 0.05), "int8": (0.01, 0.02), "w4a16": (0.12, 0.20)}
PROMPT = list(range(300, 340))


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    rig = Rig(folder, dtype=dtype, num_blocks=64, block_size=16, attention_backend="auto")
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    return rig.logits[0][0].float()


@pytest.mark.parametrize("to", BOUNDS)
def test_written_checkpoint_is_loaded_and_close(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(TINY), "--to", to, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    of_weights, of_logits = BOUNDS[to]
    assert float(said.split("error of the weights: ")[1].split("%")[0]) / 100 < of_weights
    assert (out / "tokenizer.json").is_file()
    want = logits(TINY)
    for dtype in ("float32", "bfloat16"):
        assert float((logits(out, dtype) - want).norm() / want.norm()) < of_logits


@pytest.mark.parametrize("to", BOUNDS)
def test_the_output_head_too(to: str, tmp_path: Path) -> None:
    """The head of quire-tiny is tied to its embeddings, which are kept unquantized beside it."""
    out = tmp_path / "out"
    assert main(["quantize", str(TINY), "--to", to, "--lm-head", "--out", str(out)]) == 0
    tensors = load_file(out / "model.safetensors")
    assert tensors["language_model.model.embed_tokens.weight"].dtype is torch.bfloat16
    assert "language_model.lm_head.weight_scale" in tensors
    want = logits(TINY)
    for dtype in ("float32", "bfloat16"):
        assert float((logits(out, dtype) - want).norm() / want.norm()) < BOUNDS[to][1] + 0.03


@pytest.mark.parametrize("to", BOUNDS)
def test_the_tower_of_a_model_that_takes_pictures_stays_as_it_is(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(TINY), "--to", to, "--out", str(out)]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, out))
    beside = [name for name in before if not name.startswith("language_model.")]
    assert beside
    for name in beside:
        assert torch.equal(before[name], after[name]), name
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    patterns = [one.removeprefix("re:") for one in ignored if one.startswith("re:")]
    assert all(any(re.match(pattern, name) for pattern in patterns) for name in beside)
    assert not any(re.match(pattern, "language_model.model.layers.0.mlp.up_proj") for pattern in patterns)


def test_shards_are_preserved(tmp_path: Path) -> None:
    tensors = load_file(TINY / "model.safetensors")
    split = tmp_path / "split"
    shutil.copytree(TINY, split)
    (split / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, split / file)
    places = {name: file for file, held in halves.items() for name in held}
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert main(["quantize", str(split), "--to", "w4a16", "--out", str(tmp_path / "out")]) == 0
    assert main(["quantize", str(TINY), "--to", "w4a16", "--out", str(tmp_path / "whole")]) == 0
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "whole"))


def test_unquantizable_models_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(TINY), "--to", "int8", "--out", str(out)]) == 0
    assert main(["quantize", str(out), "--to", "int8"]) == 1
    assert "is already quantized (compressed-tensors)" in capsys.readouterr().err
    assert main(["quantize", str(TINY), "--to", "int8", "--out", str(out)]) == 1
    assert "out exists and is not empty" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "none"), "--to", "int8"]) == 1
    assert "config.json" in capsys.readouterr().err
