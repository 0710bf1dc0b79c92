"""Model properties that kernels depend on, and arguments of such shapes for calls that compile a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quire.kernels.routing import Gate, Routing

Call = Callable[[], object]  # call of a kernel, which compiles it
Calls = Iterator[Call]

NUM_BLOCKS, TABLE_WIDTH = 16, 16  # blocks of a KV cache, and width of a block table
ROWS = 8  # rows of a step; does not affect kernels


@dataclass(frozen=True)
class ExpertsShape:
    """Properties of a mixture of experts that its kernels depend on."""

    num_experts: int
    intermediate_size: int
    routing: Routing
    gate: Gate
    biased: bool
    score_correction_bias: bool
    shared_is_there: bool
    shared_is_gated: bool
    single_row: bool  # the fused chain for single rows is used


@dataclass(frozen=True)
class PackedShape:
    """Properties of 4-bit weights that their kernels depend on."""

    group_size: int  # 0: one group per row
    zero: float | None  # common zero point; None: one per group


@dataclass(frozen=True)
class LatentShape:
    """Properties of latent attention that its kernels depend on."""

    rank: int
    rope: int
    still: int  # elements of a head's queries without rotation


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model, or of one rank's part of it, that its kernels depend on."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # vocabulary of this rank
    qk_norm: bool
    block_size: int
    max_num_seqs: int
    dtype: str  # "bfloat16", ...
    kv_dtype: str
    single_row: bool  # the fused chain is used
    batch_invariant: bool = False  # the kernels of batch_invariant are used
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    attention_sinks: bool = False
    softcap: float = 0.0  # of attention scores
    chunked_windows: bool = False  # some layers have chunked windows
    is_whole: bool = True  # not sharded
    packed: PackedShape | None = None  # weights of all products except the output head
    num_adapters: int = 0  # capacity for low-rank adapters
    has_trees: bool = False  # drafts may be trees
    sees_ahead: bool = False  # tokens of a picture see its later tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def attends_in_pages(self) -> bool:
        """Whether attention is that of attention/: neither latent nor batch invariant."""
        return self.latent is None and not self.batch_invariant

    @property
    def runs_single_rows(self) -> bool:
        return self.single_row and not self.batch_invariant

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Creates a tensor without memory, in the model's dtype by default."""
        return torch.empty(size, dtype=dtype or self.torch_dtype, device="meta")

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Creates key and value caches without memory."""
        size = NUM_BLOCKS, self.block_size, self.num_kv_heads, self.head_dim
        dtype = getattr(torch, self.kv_dtype)
        return self.empty(*size, dtype=dtype), self.empty(*size, dtype=dtype)

    def latent_cache(self) -> torch.Tensor:
        assert self.latent is not None
        width = self.latent.rank + self.latent.rope
        return self.empty(NUM_BLOCKS, self.block_size, 1, width, dtype=getattr(torch, self.kv_dtype))

    def sinks(self) -> torch.Tensor | None:
        return floats(self.num_q_heads) if self.attention_sinks else None

    def head_norm(self) -> torch.Tensor | None:
        """Creates the weight of query and key norms."""
        return self.empty(self.head_dim) if self.qk_norm else None

    def cos_sin(self) -> torch.Tensor:
        return floats(self.block_size * TABLE_WIDTH, self.head_dim)


def floats(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device="meta")


def ints(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device="meta")


def longs(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device="meta")
