"""What the model asks of an attention implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quire.shared.step_value import step_value

if TYPE_CHECKING:  # backends are also named where there is no torch, by the simulated worker
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model needs of attention on a device. One backend serves all layers."""

    device: str  # "cpu" or "cuda"
    dtype: str  # of queries: "float32", "bfloat16", "float16"
    kv_dtype: str  # of the cache: the same, or "float8_e4m3fn"
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    block_size: int
    has_window: bool  # some layer has a sliding window
    capability: tuple[int, int] = (0, 0)  # of the GPU: (9, 0) for a Hopper
    has_sinks: bool = False  # a score of each head takes part in every softmax
    has_softcap: bool = False  # scores are capped
    has_chunked_windows: bool = False  # windows begin at multiples of their length instead of sliding
    latent_rank: int = 0  # > 0: head_dim elements a token are cached for all heads, of which so many are the value
    batch_invariant: bool = False  # a row must have the same bits alone, in any batch and in any chunk
    has_trees: bool = False  # drafts may be trees: rows come with a mask (AttentionMetadata.tree_mask)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Rows of a decode step whose block tables begin alike, cut into tiles. Tensors are int32, on the device."""

    members: Tensor  # [num_tiles, rows_per_prefix_tile] rows of one group; -1: none
    tables: Tensor  # [num_tiles] a row whose table begins with the shared blocks
    lens: Tensor  # [num_tiles] positions in those blocks; 0: the tile is not used
    starts: Tensor  # [num_rows] the same for each row; 0: it shares nothing


class Exchange(Protocol):
    """Between ranks that share out the tokens of a step."""

    def __call__(self, *caches: Tensor) -> None:
        """What each has stored of its own tokens is in the `caches` of all when this is done."""


@step_value
class AttentionMetadata:
    """Where the rows of a step stand. Tensors are int32, on the device."""

    block_tables: Tensor  # [num_rows, width]
    query_start: Tensor | None  # [num_rows + 1]; None in a decode step, where each row has one token
    seq_lens: Tensor  # [num_rows], the step's tokens included
    max_query_len: int  # tokens of the row that has most in this step
    max_seq_len: int  # the largest of seq_lens, or more
    order: Tensor | None = None  # [num_rows] rows, longest first; None: they are not sorted
    prefixes: SharedPrefixes | None = None  # of a decode step; None: nothing is shared
    is_recorded: bool = False  # part of a CUDA graph of steps with chunks
    exchange: Exchange | None = None  # comes before attention; None: all of the step's tokens are here
    tree_mask: Tensor | None = None  # int64 [num_tokens] what each sees of a tree of drafts; None: all before it

    @property
    def is_decode(self) -> bool:
        """Every row has one token."""
        return self.max_query_len == 1


class AttentionBackend(Protocol):
    """Attends to keys and values in blocks; they are stored before it is called."""

    @property
    def records_decodes(self) -> bool:
        """A decode step may be part of a CUDA graph (or of a tape): no tensor is looked at in Python, and rows cost by
        their lengths, not by the width of the block tables."""

    @property
    def records_chunks(self) -> bool:
        """So may any step. Behind its rows there are then others, which have no tokens."""

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        """Rows of a tile of shared prefixes; 0: this backend reads every row's keys and values, shared or not."""

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Why this one cannot serve `spec` on this machine, or None."""

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        chunked: bool = False,
    ) -> Tensor:
        """q [num_tokens, num_q_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, head_dim] -> like q.

        window: positions a row sees at most, itself included; 0: all. sinks: float32 [num_q_heads], a score of each
        head that takes its share of the softmax and gives nothing; only if the spec has them. softcap: 0: none;
        else scaled scores become softcap * tanh(score / softcap), only if the spec has it. chunked: a row sees the
        positions from the last multiple of `window` on, only if the spec has chunks.
        """


@runtime_checkable
class TreeBackend(Protocol):
    """What a backend says, too, that heeds AttentionMetadata.tree_mask. Others are not asked to serve trees."""

    @property
    def masks_trees(self) -> bool: ...


@runtime_checkable
class LatentBackend(Protocol):
    """What a backend can do, too, that takes models with latent attention (AttentionSpec.latent_rank)."""

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """kernels/reference/attention/latent_attention.py: q [num_tokens, num_q_heads, rank], q_rotated
        [num_tokens, num_q_heads, rope], cache [num_blocks, block_size, 1, rank + rope] -> like q."""
