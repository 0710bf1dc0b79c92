"""What a forward pass reads, on the device."""

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
class ForwardBatch:
    """The tokens of a step, one sequence after the other. Everything int32."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens] where keys and values go: block * block_size + offset
    attention: AttentionMetadata
    logit_tokens: Tensor | None  # [num_samples] tokens whose logits are wanted; None: all of them
    last: AttentionMetadata | None = None  # of just these, a row each: more the last layer need not compute
    other_groups: tuple[ForwardBatch, ...] = ()  # the same for the layers of each KV group behind the first
    token_types: Tensor | None = None  # [num_tokens] which of two texts each is of; None: all of the first
    drafted_states: DraftedStates | None = None  # of layers with states; None: no token of theirs is or was a draft
    second: ForwardBatch | None = None  # the same for what the layer that reads it keeps in a further group
    num_seen: Tensor | None = None  # [num_seqs] first tokens that others see; None: all of them

    def for_cache(self, cache: LayerCache) -> ForwardBatch:
        """What the layer with this cache reads."""
        of_group = self.other_groups[cache.group - 1] if cache.group else self
        return of_group if cache.second is None else replace(of_group, second=self.for_cache(cache.second))

    def with_groups(self, tables: Sequence[Tensor], mappings: Sequence[Tensor]) -> ForwardBatch:
        """`tables`, `mappings`: of the KV groups behind the first."""
        if not tables:
            return self
        others = [
            replace(self, slot_mapping=mapping, attention=replace(self.attention, block_tables=table))
            for table, mapping in zip(tables, mappings, strict=True)
        ]
        return replace(self, other_groups=tuple(others))

    def with_exchanges(self, exchanges: Sequence[Exchange], of_last: int) -> ForwardBatch:
        """`exchanges`: by KV group, with the ranks that have the step's other tokens; `of_last`: the last layer's
        group."""
        last = None if self.last is None else replace(self.last, exchange=exchanges[of_last])
        batches = [
            replace(batch, last=last, attention=replace(batch.attention, exchange=exchange))
            for batch, exchange in zip((self, *self.other_groups), exchanges, strict=True)
        ]
        return replace(batches[0], other_groups=tuple(batches[1:]))
