"""Port between the model and attention backends: model requirements, step metadata and the backend protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quire.shared.step_value import step_value

if TYPE_CHECKING:  # the simulated worker lists backends without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Requirements of a model on attention for a device. One backend serves all layers."""

    device: str  # "cpu" or "cuda"
    dtype: str  # query dtype: "float32", "bfloat16", "float16"
    kv_dtype: str  # cache dtype: the query dtype, or "float8_e4m3fn"
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    block_size: int
    has_window: bool  # at least one layer has a sliding window
    capability: tuple[int, int] = (0, 0)  # compute capability of the GPU: (9, 0) for Hopper
    has_sinks: bool = False  # attention sinks: each head adds a learned score to every softmax
    has_softcap: bool = False  # scores are soft-capped
    has_chunked_windows: bool = False  # windows begin at multiples of their length instead of sliding
    latent_rank: int = 0  # > 0: head_dim elements per token are cached, the first latent_rank are the value
    batch_invariant: bool = False  # a row has the same bits alone, in any batch and in any chunk
    has_trees: bool = False  # draft trees: rows carry a mask (AttentionMetadata.tree_mask)
    sees_ahead: bool = False  # tokens of a picture see its later tokens (AttentionMetadata.seen_ends)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Decode rows whose block tables share a prefix, cut into tiles. Tensors are int32, on the device."""

    members: Tensor  # [num_tiles, rows_per_prefix_tile] rows of one group; -1: none
    tables: Tensor  # [num_tiles] a row whose block table starts with the shared blocks
    lens: Tensor  # [num_tiles] positions in the shared blocks; 0: unused tile
    starts: Tensor  # [num_rows] shared positions of each row; 0: no shared prefix


class Exchange(Protocol):
    """Exchange of keys and values between context-parallel ranks."""

    def __call__(self, *caches: Tensor) -> None:
        """Makes the keys and values that each rank stored for its tokens available in the `caches` of all ranks, in
        place."""


@step_value
class AttentionMetadata:
    """Lengths and block tables of the rows of a step. Tensors are int32, on the device."""

    block_tables: Tensor  # [num_rows, width]
    query_start: Tensor | None  # [num_rows + 1]; None in decode steps (one token per row)
    seq_lens: Tensor  # [num_rows], including the step's tokens
    max_query_len: int  # largest number of tokens of a row in this step
    max_seq_len: int  # upper bound of seq_lens
    order: Tensor | None = None  # [num_rows] rows, longest first; None: unsorted
    prefixes: SharedPrefixes | None = None  # decode steps only; None: no shared prefixes
    is_recorded: bool = False  # part of a CUDA graph of steps with chunks
    exchange: Exchange | None = None  # runs before attention; None: this rank has all tokens of the step
    tree_mask: Tensor | None = None  # int64 [num_tokens] visible draft-tree nodes of each token; None: causal
    # int32 [num_tokens] position after the last one that each token sees, where that is later than itself; None: causal
    seen_ends: Tensor | None = None
    # Of the same tokens, each as a row, over the output of an encoder; None: there is none to attend to
    cross: AttentionMetadata | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every row has exactly one token."""
        return self.max_query_len == 1


class AttentionBackend(Protocol):
    """Attention over paged keys and values, which are stored before the call."""

    @property
    def records_decodes(self) -> bool:
        """Whether decode steps may be part of a CUDA graph or a tape.

        The backend then reads no tensor values in Python, and rows cost by their lengths, not by the block tables'
        width.
        """

    @property
    def records_chunks(self) -> bool:
        """Whether steps with chunks may be recorded as well. Such steps have padding rows without tokens at the end."""

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        """Returns the rows of a shared-prefix tile; 0: the backend does not use shared prefixes."""

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why this backend cannot serve `spec` on this machine, or None."""

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
        """Computes attention of a step's queries over the paged keys and values.

        q [num_tokens, num_q_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, head_dim] -> like q.
        window: positions visible to a row, including itself; 0: all. sinks: float32 [num_q_heads], a score per head
        that takes part in the softmax without a value; only if the spec has them. softcap: scaled scores become softcap
        * tanh(score / softcap); 0: none; only if the spec has it. chunked: a row sees positions from the last multiple
        of `window` on; only if the spec has chunks.
        """


@runtime_checkable
class TreeBackend(Protocol):
    """Extension of backends that apply AttentionMetadata.tree_mask; backends without it are rejected if draft trees are
    used."""

    @property
    def masks_trees(self) -> bool: ...


@runtime_checkable
class AheadBackend(Protocol):
    """Extension of backends that apply AttentionMetadata.seen_ends."""

    @property
    def sees_ahead(self) -> bool: ...


@runtime_checkable
class LatentBackend(Protocol):
    """Extension of backends that support latent attention (AttentionSpec.latent_rank)."""

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Computes latent attention (kernels/reference/attention/latent_attention.py).

        q [num_tokens, num_q_heads, rank], q_rotated [num_tokens, num_q_heads, rope], cache [num_blocks, block_size, 1,
        rank + rope] -> like q.
        """
