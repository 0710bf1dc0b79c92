"""A GGUF file's tensors as floats, one at a time, under the names that transformers gives them."""

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

BYTES_AT_ONCE = 4 << 20  # of blocks that are decoded: what is made of them on the way takes 30 times as much

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
INTERLEAVED = "llama"  # llama.cpp rotates neighbours in this architecture, where transformers rotates halves
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
CONFIGURATION = (ROPE_FACTORS,)  # read with the configuration


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Read when it is asked for."""

    place: TensorPlace
    num_heads: int = 0  # of queries or keys whose rows lie as neighbours; 0: rows are as they should be

    @property
    def shape(self) -> Sequence[int]:
        return self.place.shape

    def get_shape(self) -> Sequence[int]:
        return self.place.shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.read()[index]

    def read(self) -> Tensor:
        tensor = decoded(self.place)
        return halves_of_heads(tensor, self.num_heads) if self.num_heads else tensor


def tensors(path: Path) -> Iterator[tuple[str, GgufTensor]]:
    """By the names of transformers; a name that is not known here stays as it is."""
    header = read_header(path)
    heads = _heads(header)
    for name, place in header.tensors.items():
        if name in CONFIGURATION:
            continue
        found = LAYER.fullmatch(name)
        if found is None or found[2] not in IN_LAYER:
            yield OUTSIDE.get(name, name), GgufTensor(place)
            continue
        layer, part, kind = found.groups()
        yield f"model.layers.{layer}.{IN_LAYER[part]}.{kind}", GgufTensor(place, heads(part))


def _heads(header: Header) -> Callable[[str], int]:
    """Heads of a projection whose rows are to be put in order. A later part of a file in parts has no metadata, and
    takes them from the first."""
    values = Values(_first(header))
    architecture = values.text("general.architecture")

    def of(part: str) -> int:
        if architecture != INTERLEAVED or part not in HEADS:
            return 0
        queries = values.integer(f"{architecture}.{HEADS['attn_q']}")
        return values.integer(f"{architecture}.{HEADS[part]}", queries)

    return of


def _first(header: Header) -> Header:
    if "general.architecture" in header.metadata:
        return header
    from quire.shared.gguf.folder import all_parts

    return read_header(all_parts(header.path)[0])


def halves_of_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head: first those that were even, then those that were odd."""
    rows = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)


def decoded(place: TensorPlace) -> Tensor:
    """As it is stored, or float32 where it is stored in blocks."""
    raw = np.memmap(place.path, np.uint8, "c", place.start, (place.num_bytes,))  # copies what is written: nothing is
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
