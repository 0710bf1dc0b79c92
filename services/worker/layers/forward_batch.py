"""Inputs of a forward pass on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from quire.services.worker.attention.port import AttentionMetadata, Exchange
from quire.shared.step_value import step_value

if TYPE_CHECKING:
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.step.drafts.drafted_states import DraftedStates


@step_value
class MediaRows:
    """Rows of encoders that take the place of token embeddings in a step."""

    tokens: Tensor  # int64 [num_rows] tokens of the step
    rows: Tensor  # [num_rows, hidden_size or a multiple of it], in the model's dtype
    seen_ends: Tensor | None = None  # as in AttentionMetadata

    def place(self, embedded: Tensor) -> Tensor:
        """Overwrites the embeddings [num_tokens, hidden_size] of the tokens, in place, with the rows' first hidden_size
        columns; returns `embedded`."""
        return embedded.index_copy_(0, self.tokens, self.rows[:, : embedded.size(1)])

    def add_level(self, layer: int, residual: Tensor) -> None:
        """Adds, in place, what the rows hold for the residual stream [num_tokens, hidden_size] after the layer at index
        `layer` (deepstack, arXiv 2406.04334): their columns from (layer + 1) * hidden_size on, if they have them."""
        size = residual.size(1)
        first = (layer + 1) * size
        if first < self.rows.size(1):
            residual.index_add_(0, self.tokens, self.rows[:, first : first + size])

    def has_level(self, layer: int, hidden_size: int) -> bool:
        """Returns whether add_level() adds something after the layer at index `layer`."""
        return (layer + 1) * hidden_size < self.rows.size(1)


@step_value
class ForwardBatch:
    """Tokens of a step, concatenated by sequence, with KV placement and attention metadata. Tensors are int32."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens] KV slots: block * block_size + offset
    attention: AttentionMetadata
    logit_tokens: Tensor | None  # [num_samples] tokens whose logits are wanted; None: all
    last: AttentionMetadata | None = None  # metadata of these tokens as rows; the last layer may skip all others
    other_groups: tuple[ForwardBatch, ...] = ()  # batches of the layers in KV groups after the first
    token_types: Tensor | None = None  # [num_tokens] token types; None: all 0
    drafted_states: DraftedStates | None = None  # recurrent layers with drafts; None: no drafts
    second: ForwardBatch | None = None  # batch of the layer's second KV group
    num_seen: Tensor | None = None  # [num_seqs] leading tokens visible to others; None: all
    media: MediaRows | None = None  # rows in the place of token embeddings; None: none
    # [3, num_tokens] positions for rotation by time, row and column of a picture; None: `positions` on each axis
    axes: Tensor | None = None

    def for_cache(self, cache: LayerCache) -> ForwardBatch:
        """Returns the batch of a layer with this cache: block tables and slot mapping of the cache's KV group.

        If the layer has a second cache, that one's batch is `second`.
        """
        of_group = self.other_groups[cache.group - 1] if cache.group else self
        return of_group if cache.second is None else replace(of_group, second=self.for_cache(cache.second))

    def with_positions(self, positions: Tensor) -> ForwardBatch:
        """Returns the batch with other positions for rotation, in all KV groups."""
        others = tuple(replace(batch, positions=positions) for batch in self.other_groups)
        return replace(self, positions=positions, other_groups=others)

    def with_groups(self, tables: Sequence[Tensor], mappings: Sequence[Tensor]) -> ForwardBatch:
        """Returns the batch with those of further KV groups, each with its block tables and slot mapping."""
        if not tables:
            return self
        others = [
            replace(self, slot_mapping=mapping, attention=replace(self.attention, block_tables=table))
            for table, mapping in zip(tables, mappings, strict=True)
        ]
        return replace(self, other_groups=tuple(others))

    def with_media(self, media: MediaRows) -> ForwardBatch:
        """Returns the batch with rows of media, whose tokens see each other if `media` says so."""
        groups = [
            replace(batch, media=media, attention=replace(batch.attention, seen_ends=media.seen_ends))
            for batch in (self, *self.other_groups)
        ]
        return replace(groups[0], other_groups=tuple(groups[1:]))

    def with_exchanges(self, exchanges: Sequence[Exchange], of_last: int) -> ForwardBatch:
        """Returns the batch with exchanges between context-parallel ranks, one for each KV group.

        `of_last`: KV group of the last layer, whose exchange the metadata `last` gets.
        """
        last = None if self.last is None else replace(self.last, exchange=exchanges[of_last])
        batches = [
            replace(batch, last=last, attention=replace(batch.attention, exchange=exchange))
            for batch, exchange in zip((self, *self.other_groups), exchanges, strict=True)
        ]
        return replace(batches[0], other_groups=tuple(batches[1:]))
