"""Memory pages are present before a step writes them, and not long before."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from quire.kernels import cpu
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_cache import HUGE_PAGE, LayerCache
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.kv.page_prefaulter import PagePrefaulter
from tests.waiting import until

SHAPE = BlockShape(num_layers=2, block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
BLOCK_BYTES = SHAPE.num_bytes // 4  # of one layer's keys
BLOCKS_OF_A_PAGE = HUGE_PAGE // BLOCK_BYTES
PATIENCE_S = 60


def fresh() -> torch.Tensor:
    """Caches as made by kv_cache.allocate() in unused memory: an allocator may return memory that was in use."""
    size = 4 * HUGE_PAGE
    memory = torch.frombuffer(mmap.mmap(-1, size + HUGE_PAGE), dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    pages = cpu.prefer_huge_pages(memory[start : start + size])
    return pages.view(SHAPE.dtype).view(-1, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)


def present(part: torch.Tensor) -> int:
    """Number of huge pages from the start of `part` that the kernel has allocated."""
    small = 4096
    pages = (ctypes.c_ubyte * (part.nbytes // small))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.nbytes), pages) == 0
    of_each = HUGE_PAGE // small
    whole = [all(page & 1 for page in pages[at : at + of_each]) for at in range(0, len(pages), of_each)]
    return (*whole, False).index(False)


def wait_until(caches: list[LayerCache], num_pages: int) -> None:
    parts = [part for cache in caches for part in (cache.k, cache.v)]
    until(lambda: all(present(part) >= num_pages for part in parts), PATIENCE_S, "pages are missing")


@pytest.mark.skipif(bool(cpu.unavailable()), reason="needs the compiled kernels")
def test_the_next_page_is_asked_for_when_one_is_half_used() -> None:
    caches = [LayerCache(fresh(), fresh()) for _ in range(SHAPE.num_layers)]
    pages = PagePrefaulter(caches)
    wait_until(caches, 1)
    caches[1].v[3] = 7
    pages.prefault_for(BLOCKS_OF_A_PAGE // 2 - 1)
    pages.prefault_for(5)
    assert present(caches[0].k) == 1
    pages.prefault_for(BLOCKS_OF_A_PAGE // 2)
    wait_until(caches, 2)
    assert present(caches[0].k) == 2, "and no more"
    pages.prefault_for(4 * BLOCKS_OF_A_PAGE - 1)
    wait_until(caches, 4)
    assert caches[1].v.sum() == 7 * caches[1].v[3].numel(), "what is there stays"


def test_memory_without_a_whole_page_keeps_its_content_and_none_is_accepted() -> None:
    caches = kv_cache.allocate(SHAPE, 3, torch.device("cpu"))
    caches[0].k[1] = 7
    PagePrefaulter(caches).prefault_for(2)
    assert caches[0].k.sum() == 7 * caches[0].k[1].numel()
    PagePrefaulter([]).prefault_for(0)
