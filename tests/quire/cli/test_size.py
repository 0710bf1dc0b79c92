"""`quire size`: the figures are those of the checkpoint and of the worker that loads it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from quire import bundled
from quire.bench.workload.shapes import CONFIGS
from quire.cli.main import main

GIB = 1 << 30


def size(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["size", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["size", *words]) == 1
    return capsys.readouterr().err


def test_weights_are_those_of_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    stored = 0
    for file in bundled.FOLDER.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if ".post_layernorm." not in name:  # the last hidden states are taken before it
                    stored += math.prod(tensors.get_slice(name).get_shape())
    found = size(capsys, "tiny", "--gpu-memory", "16", "--dtype", "bfloat16")
    assert found["num_parameters"] == stored
    assert found["weight_bytes"] == 2 * stored


def test_kv_of_a_token_is_keys_and_values_of_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS["llama3-8b"]
    layers, heads, length = (config[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    found = size(capsys, "llama3-8b", "--gpu-memory", "80")
    assert found["kv_bytes_per_token"] == 2 * layers * heads * length * 2
    halved = size(capsys, "llama3-8b", "--gpu-memory", "80", "--kv-cache-dtype", "fp8")
    assert halved["kv_bytes_per_token"] == found["kv_bytes_per_token"] / 2


def test_the_fewest_gpus_that_hold_the_model_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["gpu_gib"]: row for row in size(capsys, "llama3-70b", "--length", "4k")["gpus"]}
    assert rows[16]["num_gpus"] in (16, 0)
    assert rows[80]["num_gpus"] == 2
    assert rows[180]["num_gpus"] == 1
    used = 70 * 2e9 / GIB + rows[180]["kv_tokens"] * 320 * 1024 / GIB
    assert used < 180 * 0.9


def test_more_tokens_in_a_sequence_mean_fewer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        size(capsys, "llama3-8b", "--gpu-memory", "80", "--length", length)["gpus"][0]["num_sequences"]
        for length in ("100K", "1K")
    )
    assert 0 < few < many


def test_what_does_not_fit_says_so_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "llama3-70b", "--gpu-memory", "24", "--tensor-parallel-size", "1"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "--kv-cache-dtype fp8" in shown


def test_windows_and_states_do_not_grow_with_the_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    found = size(capsys, "qwen3-next-12-layers", "--gpu-memory", "141")
    config = CONFIGS["qwen3-next-12-layers"]
    full = config["num_hidden_layers"] // config["full_attention_interval"]
    assert found["kv_bytes_per_token"] == 2 * full * config["num_key_value_heads"] * config["head_dim"] * 2


@pytest.mark.parametrize("memory", ["nan", "-5", "0", "inf", "much"])
def test_a_gpu_without_a_size_is_refused(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["size", "tiny", f"--gpu-memory={memory}"])
    assert "is not a number of GiB" in capsys.readouterr().err


def test_a_config_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-0.6b"]))
    of_file = size(capsys, str(tmp_path / "config.json"), "--gpu-memory", "24")
    assert of_file == size(capsys, "qwen3-0.6b", "--gpu-memory", "24")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no/such-model"], "is not on this machine"),
        (["bert-base"], "an encoder keeps no KV"),
        (["tiny", "--length", "1M"], "is more than max_model_len"),
        (["llama3-8b", "--tensor-parallel-size", "3"], "3 ranks do not divide"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(capsys, *words)


@pytest.mark.parametrize(
    ("flags", "types", "method"),
    [
        ((), "(bfloat16)", None),
        (("--quantization", "fp8"), "(fp8; what stays unquantized: bfloat16)", "fp8"),
        (
            ("--quantization", "fp8_block", "--dtype", "float16"),
            "(fp8_block; what stays unquantized: float16)",
            "fp8_block",
        ),
    ],
)
def test_the_types_of_weights_are_named(
    flags: tuple[str, ...], types: str, method: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("llama3-8b", "--gpu-memory", "80", *flags)
    assert main(["size", *words]) == 0
    (weights,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("weights")]
    assert weights.endswith(types)
    assert size(capsys, *words)["quantization"] == method


def test_the_method_of_a_quantized_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama3-8b"], "quantization_config": quantized}))
    assert size(capsys, str(tmp_path), "--gpu-memory", "80")["quantization"] == "fp8"


def test_a_model_that_does_not_exist_is_told_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave it out for the bundled model" in refused(capsys, "quire-tiny")
