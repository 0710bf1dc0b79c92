"""Memory for the keys and values of all blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference.attention.kv_dtype import as_bytes
from quire.services.worker.device.staging import upload
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.step.block_copies import BlockCopies
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import Cross, State

CACHE_LINE = 64
HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cached keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    A latent vector is both key and value: one tensor. Layers that keep a state have float32 words in both tensors,
    [num_blocks, words] (kernels/state_pages.py)."""

    k: Tensor
    v: Tensor
    # int64 [parts of all layers, num_blocks, words of a block], if the memory of all layers is contiguous
    all_layers: Tensor | None = None
    group: int = 0  # KV group
    block_size: int = 0  # set for a layer that keeps a state
    second: LayerCache | None = None  # cache of the layer in a further group
    cross: LayerCache | None = None  # keys and values of encoder outputs, if the layer attends to them

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Tensors of this cache that do not share memory."""
        own = (self.k,) if self.v is self.k else (self.k, self.v)
        return own if self.second is None else own + self.second.parts

    @property
    def last_group(self) -> int:
        """The last KV group that the layer uses."""
        return self.group if self.second is None else self.second.last_group


def caches_by_layer(memory: list[LayerCache], layout: KVLayout) -> list[LayerCache]:
    """Returns the cache of each layer, with further groups chained in `second`. `memory`: caches by place in a page,
    which layers of several groups share; layers with a state see it as float32 words."""
    by_layer = []
    for stored in layout.places:
        cache, cross = None, None
        for group, place in reversed(stored):
            if isinstance(layout.groups[group].spec, Cross):
                cross = memory[place]
                continue
            cache = replace(_group_view(memory[place], layout, group), second=cache)
        assert cache is not None, "every layer has a cache"
        by_layer.append(cache if cross is None else replace(cache, cross=cross))
    return by_layer


def _group_view(shared: LayerCache, layout: KVLayout, group: int) -> LayerCache:
    """Returns the shared memory as a group uses it: unchanged for attention, [num_blocks, words] of float32 for a
    state."""
    if not isinstance(layout.groups[group].spec, State):
        return replace(shared, group=group)
    k, v = (part.flatten(1).view(torch.float32) for part in (shared.k, shared.v))
    return replace(shared, k=k, v=v, group=group, block_size=shared.k.size(1))


def allocate(
    shape: BlockShape,
    num_blocks: int,
    device: torch.device,
    zeros: Callable[[int], Tensor | None] = lambda _num_bytes: None,
) -> list[LayerCache]:
    """Allocates zeroed caches, one per layer of a page: kernels may load unused places, where a stray NaN would spread.
    `zeros`: allocates the given number of bytes on the device, or returns None for default memory. Raises
    InvalidArgument if the host's memory does not suffice."""
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    num_parts, words = shape.num_parts * shape.num_layers, None
    if device.type == "cpu":
        try:
            parts = [_host_zeros(size, dtype=shape.dtype) for _ in range(num_parts)]
        except (MemoryError, ValueError):
            text = f"{num_blocks} blocks of {shape.num_bytes} bytes do not fit into this host's memory"
            raise InvalidArgument(f"num_blocks: {text}", field="num_blocks") from None
    else:
        custom = zeros(num_parts * math.prod(size) * shape.dtype.itemsize)
        if custom is None:
            whole = torch.zeros((num_parts, *size), dtype=shape.dtype, device=device)
        else:
            whole = custom.view(shape.dtype).view((num_parts, *size))
        parts, words = list(whole), whole.flatten(2).view(torch.int64)
    keys, values = parts[:: shape.num_parts], parts[shape.num_parts - 1 :: shape.num_parts]
    return [LayerCache(k, v, words) for k, v in zip(keys, values, strict=True)]


def copy_blocks(caches: list[LayerCache], copies: BlockCopies) -> None:
    """Copies whole blocks of all layers and groups from `sources` to `targets`; of each tensor all sources are read
    before a target is written."""
    device = caches[0].k.device
    sources, targets = (upload(ids, device, np.int64) for ids in (copies.sources, copies.targets))
    whole = caches[0].all_layers
    if whole is not None:  # two launches instead of four per layer
        whole.index_copy_(1, targets, whole.index_select(1, sources))
        return
    parts = {part.data_ptr(): part for cache in caches for part in cache.parts}  # layers of several groups share memory
    for part in parts.values():
        part.index_copy_(0, targets, part.index_select(0, sources))


def move_tokens(caches: list[LayerCache], sources: I32, targets: I32) -> None:
    """Copies keys and values of tokens from the places `sources` (block * block_size + offset) to `targets`."""
    device = caches[0].k.device
    source_places, target_places = (upload(ids, device, np.int64) for ids in (sources, targets))
    whole, (num_blocks, block_size) = caches[0].all_layers, caches[0].k.shape[:2]
    if whole is not None and whole.size(2) % block_size == 0:  # as in copy_blocks(): a token is whole words
        words = whole.view(len(whole), num_blocks * block_size, -1)
        words.index_copy_(1, target_places, words.index_select(1, source_places))
        return
    for cache in caches:
        for part in cache.parts:
            rows = as_bytes(part).flatten(0, 1)
            rows.index_copy_(0, target_places, rows.index_select(0, source_places))


def _host_zeros(size: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Allocates zeroed memory whose pages the kernel allocates on first use: torch.zeros takes 2 s per GiB.

    The memory is aligned to huge pages if it is large enough. Without alignment its start consists of small pages,
    which made a prompt of 128 tokens on a fresh cache of Qwen3-0.6B wait 30 ms for 3,600 of them."""
    from quire.kernels import cpu

    num_bytes = math.prod(size) * dtype.itemsize
    alignment = HUGE_PAGE if num_bytes >= HUGE_PAGE else CACHE_LINE
    memory = np.zeros(num_bytes + alignment, dtype=np.uint8)
    start = -memory.ctypes.data % alignment
    pages: Tensor = cpu.prefer_huge_pages(torch.from_numpy(memory[start : start + num_bytes]))
    return pages.view(dtype).view(size)
