"""A small valid file for tests to modify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import gguf_files

SIZES = {"token_embd": (40, 32), "output_norm": (32,)}
LAYER = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "ffn_gate": (64, 32)}
METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    **gguf_files.byte_tokens(40),
}
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(changes: dict[str, Any] | None = None, **tensors: gguf_files.Tensor | None) -> Path:
        """Writes the file with changed metadata (None removes a key) and other or additional tensors."""
        named = {**SIZES, **{f"blk.0.{name}": shape for name, shape in LAYER.items()}}
        held: dict[str, Any] = {f"{name}.weight": gguf_files.plain(torch.ones(shape)) for name, shape in named.items()}
        held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        metadata = {**METADATA, **(changes or {})}
        return gguf_files.write(
            tmp_path / "small.gguf",
            {key: value for key, value in metadata.items() if value is not None},
            {name: tensor for name, tensor in held.items() if tensor is not None},
        )

    return write
