"""Limits of a worker: defaults, memory, and settings that do not fit."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from quire.services.worker.attention import backends
from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.device.device import Device, choose_dtype, choose_kv_dtype, choose_quantization, open_device
from quire.services.worker.kv import kv_memory
from quire.services.worker.kv.kv_memory import GIB, BlockShape
from quire.services.worker.limits import worker_limits
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models import attention_spec
from quire.services.worker.models.registry import read_model_config
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.settings import WorkerSettings

SHAPE = BlockShape(num_layers=2, block_size=16, num_kv_heads=4, head_dim=8, dtype=torch.bfloat16)
SPEC = AttentionSpec("cuda", "float32", "float32", 8, 4, 2, 16, has_window=False)


def wanted(model_max_len: int = 4096, **settings: Any) -> WorkerLimits:
    return worker_limits.from_settings(WorkerSettings(model="somewhere", **settings), model_max_len)


def test_defaults_depend_on_the_device() -> None:
    assert wanted() == WorkerLimits(16, 128, 2048, 4096)
    assert wanted(device="cuda") == WorkerLimits(64, 512, 8192, 4096)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


def block_size(changes: dict[str, Any], *, has_trees: bool = False, **settings: Any) -> int:
    given = WorkerSettings(model="somewhere", **{"device": "cuda", **settings})
    config = read_model_config({**LLAMA, **changes})
    block_size = attention_spec.block_size_for(given, config, has_trees=has_trees)
    return worker_limits.from_settings(given, 4096, block_size).block_size


def test_blocks_are_as_large_as_the_attention_that_was_asked_for_needs_them() -> None:
    assert block_size({}, attention_backend="flash_attn_2") == 256
    assert block_size({}, attention_backend="flash_attn_2", block_size=512) == 512
    assert block_size({}, attention_backend="flash_attn") == 128
    assert block_size({}, attention_backend="triton") == 64


@pytest.mark.parametrize("installed", [True, False])
def test_blocks_are_a_tile_of_flash_attn_where_that_computes_prompts(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    found = [object()] if installed else []
    monkeypatch.setattr(
        attention_spec.metadata, "distributions", lambda name: iter(found if name == "flash-attn-4" else [])
    )
    assert block_size({}) == (128 if installed else 64)
    assert block_size({}, has_trees=True) == 64
    assert block_size({}, block_size=32) == 32
    assert block_size({}, device="cpu") == 16
    refused: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"num_attention_heads": 8}, {}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({}, {"batch_invariant": True}),
        ({}, {"attention_backend": "triton"}),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "head_dim": 128,
                "hidden_activation": "gelu_pytorch_tanh",
            },
            {},
        ),
    ]
    assert [block_size(changes, **settings) for changes, settings in refused] == [64] * len(refused)


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(InvalidArgument, match="64 is less than max_num_seqs, 65"):
        wanted(max_num_seqs=65, max_num_batched_tokens=64)


def test_a_sequence_must_not_be_longer_than_the_models_positions() -> None:
    with pytest.raises(InvalidArgument, match="5000 is longer than the model's 4096 positions"):
        wanted(max_model_len=5000)


def test_default_length_is_shortened_to_fit() -> None:
    fitting = worker_limits.fit(wanted(), 101, explicit=False)
    assert (fitting.max_model_len, fitting.num_tokens) == (1600, 1600)
    assert worker_limits.fit(wanted(), 1001, explicit=False).max_model_len == 4096


def test_explicit_length_must_fit() -> None:
    with pytest.raises(InvalidArgument, match="2000 tokens do not fit in the KV memory, which holds 1600"):
        worker_limits.fit(wanted(max_model_len=2000), 101, explicit=True)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_the_null_block_alone_is_not_enough(num_blocks: int) -> None:
    with pytest.raises(InvalidArgument, match="hold no sequence"):
        worker_limits.fit(wanted(), num_blocks, explicit=False)


def test_concurrency_counts_whole_blocks() -> None:
    assert WorkerLimits(16, 1, 1, max_model_len=17, num_blocks=11).max_concurrency == 5


def test_bytes_of_a_block() -> None:
    assert SHAPE.num_bytes == 2 * 2 * 16 * 4 * 8 * 2


def test_cpu_budget() -> None:
    """A tenth of free memory, at most 4 GiB, unless set."""
    assert kv_memory.cpu_budget(0, 10 * GIB) == GIB
    assert kv_memory.cpu_budget(2.5, 10 * GIB) == int(2.5 * GIB)
    assert kv_memory.cpu_budget(0, 1000 * GIB) == 4 * GIB


def test_free_memory_of_this_machine_is_found() -> None:
    assert kv_memory.free_host_bytes() > 0


def test_cuda_budget_leaves_other_memory() -> None:
    assert kv_memory.cuda_budget(0.9, 100, 30) == 60


@pytest.mark.parametrize(
    ("asked", "checkpoint", "fast", "chosen"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "bfloat16", False, "float32"),
        ("auto", "float16", True, "float32"),
        ("auto", "", True, "float32"),
        ("bfloat16", "float32", False, "bfloat16"),
    ],
)
def test_dtype_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, asked: str, checkpoint: str, fast: bool, chosen: str
) -> None:
    monkeypatch.setattr("quire.services.worker.device.device._cpuinfo", lambda _key: "avx512_bf16" if fast else "avx2")
    assert str(choose_dtype(asked, checkpoint, Device("cpu", "some"))) == f"torch.{chosen}"


def test_an_unknown_dtype_of_a_checkpoint_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"float8_e4m3fn.*supported: bfloat16"):
        choose_dtype("auto", "float8_e4m3fn", Device("cuda", "some"))


def test_attention_auto_skips_refusing_backends() -> None:
    chosen = backends.choose_attention("auto", SPEC)
    assert type(chosen).__name__ == "ReferenceAttention"


def test_an_attention_backend_that_cannot_serve_says_why() -> None:
    with pytest.raises(InvalidArgument, match="cpu does not support this model: runs on the CPU, not on cuda"):
        backends.choose_attention("cpu", SPEC)


def test_an_unknown_attention_backend_lists_what_exists() -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"'flash' does not exist; available: auto, cpu, flash_attn, flash_attn_2, triton",
    ):
        backends.choose_attention("flash", SPEC)


def test_a_cache_of_8_bits_takes_half_the_memory_and_a_gpu() -> None:
    cpu, cuda = Device("cpu", ""), Device("cuda", "")
    assert choose_kv_dtype("auto", torch.bfloat16, cpu) is torch.bfloat16
    eight = choose_kv_dtype("fp8", torch.bfloat16, cuda)
    assert 2 * dataclasses.replace(SHAPE, dtype=eight).num_bytes == SHAPE.num_bytes
    with pytest.raises(InvalidArgument, match="kv_cache_dtype: fp8 needs device cuda"):
        choose_kv_dtype("fp8", torch.bfloat16, cpu)
    with pytest.raises(InvalidArgument, match="quantization: fp8_block needs device cuda"):
        choose_quantization("fp8_block", "", cpu)
    assert choose_quantization("none", "", cpu) == "none"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Torch not compiled with CUDA enabled", "Torch not compiled with CUDA enabled"),
        (
            "The NVIDIA driver is too old (found version 12020). Please update it.\nMore.",
            "The NVIDIA driver is too old .*",
        ),
        ("", "the driver lists no GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_torchs_reason(
    said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if said:
            raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(FailedPrecondition) as caught:
        open_device("cuda", 1)
    assert re.fullmatch(f"device: cuda was asked for, but torch sees none: {reason}", str(caught.value))
    assert "update" not in str(caught.value)
