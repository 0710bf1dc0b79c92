"""Reads the tensors of a GGUF file as floats, one at a time, under the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.models.gguf.blocks import DECODE, PLAIN
from quire.shared.gguf.config import ROPE_FACTORS
from quire.shared.gguf.header import Header, TensorPlace, Values, read_header

BYTES_AT_ONCE = 4 << 20  # bytes decoded at a time; temporaries take 30 times as much

LAYER = re.compile(r"blk\.(\d+)\.(.*)\.(weight|bias)")
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INTERLEAVED = "llama"  # llama.cpp rotates neighbouring pairs in this architecture, transformers halves
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
CONFIGURATION = (ROPE_FACTORS,)  # read with the configuration


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor of a GGUF file, read lazily."""

    place: TensorPlace
    num_heads: int = 0  # heads of queries or keys with rows in neighbouring pairs; 0: no reordering

    @property
    def shape(self) -> Sequence[int]:
        return self.place.shape

    def get_shape(self) -> Sequence[int]:
        return self.place.shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Dequantizes the whole tensor and returns the part at `index`."""
        return self.read()[index]

    def read(self) -> Tensor:
        """Returns the tensor as stored, or float32 if it is quantized, with the rows of queries and keys in the order
        of transformers."""
        tensor = decoded(self.place)
        return halves_of_heads(tensor, self.num_heads) if self.num_heads else tensor


def tensors(path: Path) -> Iterator[tuple[str, GgufTensor]]:
    """Yields the tensors of a GGUF file by their names in transformers; unknown names are kept.

    Tensors that belong to the configuration (rope factors) are left out. Nothing is read but the header.
    """
    header = read_header(path)
    heads = _heads(header)
    for name, place in header.tensors.items():
        if name in CONFIGURATION:
            continue
        match = LAYER.fullmatch(name)
        if match is None or match[2] not in IN_LAYER:
            yield OUTSIDE.get(name, name), GgufTensor(place)
            continue
        layer, part, kind = match.groups()
        yield f"model.layers.{layer}.{IN_LAYER[part]}.{kind}", GgufTensor(place, heads(part))


def _heads(header: Header) -> Callable[[str], int]:
    """Returns a function that maps a projection's GGUF name to its number of heads if its rows are reordered, else to
    0.

    Later parts of a split file have no metadata and use that of the first.
    """
    values = Values(_first(header))
    architecture = values.text("general.architecture")

    def of(part: str) -> int:
        """Returns the number of heads of projection `part` ("attn_q", "attn_k") for the Llama architecture, else 0."""
        if architecture != INTERLEAVED or part not in HEADS:
            return 0
        queries = values.integer(f"{architecture}.{HEADS['attn_q']}")
        return values.integer(f"{architecture}.{HEADS[part]}", queries)

    return of


def _first(header: Header) -> Header:
    """Returns the header with the model's metadata: this one, or that of the first part of a split file."""
    if "general.architecture" in header.metadata:
        return header
    from quire.shared.gguf.folder import all_parts

    return read_header(all_parts(header.path)[0])


def halves_of_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head from neighbouring pairs to halves: even rows first, then odd ones."""
    rows = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)


def decoded(place: TensorPlace) -> Tensor:
    """Returns the tensor as stored, mapped from the file, or dequantized to float32 if it is stored in quantized
    blocks."""
    raw = np.memmap(place.path, np.uint8, "c", place.start, (place.num_bytes,))  # copy-on-write, never written
    stored = torch.from_numpy(raw)
    plain = PLAIN.get(place.kind.name)
    if plain is not None:
        return stored.view(plain).view(place.shape)
    size, length = place.kind.block_bytes, place.kind.block_size
    blocks, decode = stored.view(-1, size), DECODE[place.kind.name]
    result = torch.empty(len(blocks), length)
    step = max(1, BYTES_AT_ONCE // size)
    for begin in range(0, len(blocks), step):
        result[begin : begin + step] = decode(blocks[begin : begin + step])
    return result.view(place.shape)
