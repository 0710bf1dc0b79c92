"""Writes GGUF files from the published layout, independently of the code that reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.services.worker.checkpoints import Checkpoint

ALIGNMENT = 32
NUMBERS = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30},
}
# Kind -> elements of a block, its bytes, where its float16 scales are.
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}

IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Tensor:
    """A tensor to write; `shape`: outermost first; `number`: type; `content`: bytes."""

    def __init__(self, shape: Sequence[int], number: int, content: bytes) -> None:
        self.shape, self.number, self.content = tuple(shape), number, content


def text(value: str) -> bytes:
    written = value.encode()
    return struct.pack("<Q", len(written)) + written


def value(content: Any) -> bytes:
    """Encodes a value with its type."""
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    if all(isinstance(one, str) for one in content):
        return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(text, content))
    kind, letter = (5, "i") if all(isinstance(one, int) for one in content) else (6, "f")
    return struct.pack(f"<IIQ{len(content)}{letter}", 9, kind, len(content), *content)


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [text(key) + value(content) for key, content in metadata.items()]
    body = bytearray()
    for name, tensor in tensors.items():
        body += bytes(-len(body) % ALIGNMENT)
        shape = tensor.shape[::-1]
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.number, len(body))
        head.append(text(name) + place)
        body += tensor.content
    begin = b"".join(head)
    path.write_bytes(begin + bytes(-len(begin) % ALIGNMENT) + body)
    return path


def plain(tensor: torch.Tensor, kind: str = "F32") -> Tensor:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    stored = tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(tensor.shape, NUMBERS[kind], stored)


def q8_0(tensor: torch.Tensor) -> Tensor:
    """Quantizes in blocks of 32, each with the scale that maps its largest value to 127."""
    blocks = tensor.detach().float().reshape(-1, 32).numpy()
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(blocks / np.maximum(scales.astype(np.float32), 1e-8)).clip(-127, 127).astype(np.int8)
    return Tensor(tensor.shape, NUMBERS["Q8_0"], _side_by_side(scales, codes))


def q4_0(tensor: torch.Tensor) -> Tensor:
    """Quantizes in blocks of 32 whose largest value becomes -8: two codes per byte, of positions i and i + 16."""
    blocks = tensor.detach().float().reshape(-1, 32).numpy()
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scales = (largest / -8).astype(np.float16)
    wide = scales.astype(np.float32)
    codes = np.round(blocks / np.where(wide == 0, 1, wide) + 8).clip(0, 15).astype(np.uint8)
    return Tensor(tensor.shape, NUMBERS["Q4_0"], _side_by_side(scales, codes[:, :16] | codes[:, 16:] << 4))


def random_blocks(kind: str, num_elements: int, seed: int) -> NDArray[np.uint8]:
    """Returns random codes with realistic scales. [blocks, bytes of a block]"""
    rng = np.random.default_rng(seed)
    size, num_bytes, scales_at = BLOCKS[kind]
    blocks = rng.integers(0, 256, (num_elements // size, num_bytes), dtype=np.uint8)
    for at in scales_at:
        scales = rng.normal(scale=2e-4 if size == 256 else 5e-3, size=(len(blocks), 1))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks


def _side_by_side(*columns: NDArray[Any]) -> bytes:
    return np.concatenate([np.ascontiguousarray(column).view(np.uint8) for column in columns], 1).tobytes()


def interleaved(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permutes the rows of each head as llama.cpp does: alternating between the first and second half."""
    heads = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def in_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reverses `interleaved`."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def of_checkpoint(made: Checkpoint, architecture: str, matrices: Any = plain) -> dict[str, Tensor]:
    """A checkpoint's tensors under llama.cpp's names; `matrices`: how those of two dimensions are stored."""
    config, tensors = made.model.config, {}
    tied = config.tie_word_embeddings
    for name, tensor in made.model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if tied and stem == "lm_head":
            continue
        if stem in OUTSIDE:
            new = OUTSIDE[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}.{IN_LAYER[part]}"
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            queries = stem.endswith("q_proj")
            heads = config.num_attention_heads if queries else config.num_key_value_heads
            tensors[f"{new}.{kind}"] = _stored(interleaved(tensor, heads), matrices)
        else:
            tensors[f"{new}.{kind}"] = _stored(tensor, matrices)
    return tensors


def _stored(tensor: torch.Tensor, matrices: Any) -> Tensor:
    stored: Tensor = matrices(tensor) if tensor.dim() > 1 else plain(tensor)
    return stored


def describing(made: Checkpoint, architecture: str) -> dict[str, Any]:
    """Converts a checkpoint's configuration to GGUF metadata."""
    config = made.model.config
    rope = config.rope_parameters
    described = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        described |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        described["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    named = {f"{architecture}.{name}": content for name, content in described.items()}
    return {"general.architecture": architecture, **named, **byte_tokens(config.vocab_size)}


def byte_tokens(vocab_size: int) -> dict[str, Any]:
    """Returns a byte-level vocabulary of this size, the last tokens of which are end and padding."""
    texts = [chr(0x100 + number) for number in range(vocab_size - 1)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*texts, "<end>"],
        "tokenizer.ggml.token_type": [1] * len(texts) + [3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": vocab_size - 1,
    }


def small(path: Path, architecture: str, **words: Any) -> Path:
    """Writes a file sufficient for readers that use no weights. `words`: metadata of another tokenizer, without
    "tokenizer."."""
    shapes = {"token_embd": (40, 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 32), "blk.0.ffn_gate": (64, 32)}
    sizes = {"context_length": 128, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": size for name, size in sizes.items()},
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        **({f"tokenizer.{key}": value for key, value in words.items()} or byte_tokens(40)),
    }
    return write(path, metadata, {f"{name}.weight": plain(torch.ones(shape)) for name, shape in shapes.items()})
