"""Metadata becomes the config.json that it stands for, or a refusal that names the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.shared.errors import InvalidArgument
from quire.shared.gguf.config import config_of
from quire.shared.gguf.folder import as_folder
from quire.shared.gguf.header import read_header
from tests import gguf_files
from tests.shared.gguf.conftest import Write


def config(write: Write, changes: dict[str, Any] | None = None, **tensors: gguf_files.Tensor | None) -> dict[str, Any]:
    return config_of(read_header(write(changes, **tensors)))


def test_sizes_and_names_are_those_of_transformers(write: Write) -> None:
    made = config(write)
    wanted = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 32}
    wanted |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    wanted |= {"head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "dtype": "float32"}
    assert {key: made[key] for key in wanted} == wanted
    assert made["rms_norm_eps"] == pytest.approx(1e-5)
    assert made["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert made["eos_token_id"] == 39
    assert made["bos_token_id"] is None


def test_what_some_tensors_alone_tell(write: Write) -> None:
    output = gguf_files.plain(torch.ones(40, 32))
    bias = gguf_files.plain(torch.ones(32))
    made = config(write, output__weight=output, blk__0__attn_q__bias=bias)
    assert (made["tie_word_embeddings"], made["attention_bias"], made["mlp_bias"]) == (False, True, False)


def test_a_window_makes_it_mistral(write: Write) -> None:
    made = config(write, {"llama.attention.sliding_window": 16})
    assert (made["architectures"], made["sliding_window"]) == (["MistralForCausalLM"], 16)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_the_dtype_is_that_of_most(write: Write, kind: str, dtype: str) -> None:
    names = {"token_embd": (40, 32), "blk.0.attn_q": (32, 32), "blk.0.ffn_gate": (64, 32)}
    tensors = {f"{n}.weight".replace(".", "__"): gguf_files.plain(torch.ones(s), kind) for n, s in names.items()}
    assert config(write, **tensors)["dtype"] == dtype


def test_blocks_become_bfloat16(write: Write) -> None:
    tensors = {"token_embd__weight": gguf_files.q8_0(torch.ones(40, 32)), "blk__0__ffn_gate__weight": None}
    tensors["blk__0__ffn_gate__weight"] = gguf_files.q4_0(torch.ones(64, 32))
    assert config(write, **tensors)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.context_length",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.pre",
    ],
)
def test_a_key_that_is_missing_is_named(write: Write, key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"it lacks the key {key}$"):
        as_folder(write({key: None}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pooling_type", 3),  # the official Qwen3-Embedding files: the last token
        ("tensor_data_layout", "Meta AI original pth"),  # files of 2023
        ("rope.scaling.attn_factor", 1.0),
        ("attention.clamp_kqv", 0.0),
        ("expert_count", 0),
    ],
)
def test_a_value_that_changes_nothing_is_taken(write: Write, key: str, value: Any) -> None:
    assert config(write, {f"llama.{key}": value}) == config(write)


def test_keys_of_the_tools_that_wrote_a_file_change_nothing(write: Write) -> None:
    """gg03, vllm#7268: what llama.cpp's quantizer and its importance matrix leave behind."""
    keys = {
        "general.quantization_version": 2,
        "general.file_type": 15,
        "general.size_label": "8B",
        "quantize.imatrix.file": "/models/x.dat",
        "quantize.imatrix.dataset": "/training/calibration.txt",
        "quantize.imatrix.entries_count": 224,
        "quantize.imatrix.chunks_count": 125,
    }
    assert config(write, keys) == config(write)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pooling_type", 1),  # the mean
        ("pooling_type", 2),
        ("tensor_data_layout", "other"),
        ("rope.scaling.attn_factor", 0.5),
        ("attention.clamp_kqv", 8.0),
        ("expert_count", 8),
    ],
)
def test_one_that_changes_what_is_computed_is_refused(write: Write, key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"llama.{key} is .*: this feature is not supported"):
        config(write, {f"llama.{key}": value})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "mamba"}, r"general\.architecture is 'mamba'; supported: llama, qwen2, qwen3"),
        ({"llama.context_length": "long"}, r"llama\.context_length is 'long': a whole number is needed"),
        ({"llama.rope.freq_base": float("nan")}, r"llama\.rope\.freq_base is nan: a finite number is needed"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8: this feature is not supported"),
        ({"llama.attention.scale": 2.0}, r"llama\.attention\.scale is 2\.0: this feature is not supported"),
        ({"llama.rope.scaling.type": "bent"}, r"llama\.rope\.scaling\.type is 'bent'; supported: none, linear, yarn"),
        ({"llama.rope.scaling.type": "linear"}, r"it lacks the key llama\.rope\.scaling\.factor"),
        ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count implies 4, but the rest of the file"),
        ({"general.alignment": 33}, r"general\.alignment is 33: a power of two is needed"),
        # A small file that would be a large model:
        ({"llama.embedding_length": 2**31}, r"llama\.embedding_length implies 2147483648, but the rest"),
        ({"llama.block_count": 2**31}, r"llama\.block_count implies 2147483648, but the rest"),
        ({"llama.feed_forward_length": 2**31}, r"llama\.feed_forward_length implies 2147483648, but the rest"),
        ({"llama.attention.key_length": 2**20}, r"llama\.attention\.head_count implies 4194304, but the rest"),
    ],
)
def test_what_is_not_known_or_at_odds_is_named(write: Write, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        as_folder(write(changes))


def test_a_window_of_some_layers_is_not_guessed(write: Write) -> None:
    changes = {"general.architecture": "qwen2", "qwen2.attention.sliding_window": 8}
    with pytest.raises(InvalidArgument, match=r"qwen2\.attention\.sliding_window is 8: .* for which layers"):
        config(write, changes)
