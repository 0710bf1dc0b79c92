"""Sizes of prompt chunks within a step's budget."""

from __future__ import annotations

from quire.services.scheduler.core.sequences.media import item_around
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder


def chunk_size(state: CoreState, builder: PlanBuilder, sequence: Sequence, begin: int, num_remaining: int) -> int:
    """Takes tokens of a prompt, from position `begin` on, from the step's budget: at most `num_remaining`, and at most
    long_prefill_token_threshold if other sequences are present. Returns the number of tokens of this step's chunk,
    possibly 0."""
    threshold = state.limits.long_prefill_token_threshold
    alone = len(state.sequences) == 1
    at_most = num_remaining if threshold == 0 or alone or state.limits.whole_prompts else threshold
    if state.limits.whole_media and sequence.media:
        return _chunk_of_whole_items(builder, sequence, begin, num_remaining, at_most)
    return builder.budget.try_add(num_remaining, at_most)


def least_chunk(state: CoreState, sequence: Sequence, begin: int) -> int:
    """Returns the least number of tokens from position `begin` on that a step may compute: those of a media item that
    is computed as a whole, else 1."""
    if not (state.limits.whole_media and sequence.media):
        return 1
    item = item_around(sequence.media, begin + 1)
    return 1 if item is None else item.end - begin


def _chunk_of_whole_items(
    builder: PlanBuilder, sequence: Sequence, begin: int, num_remaining: int, at_most: int
) -> int:
    """Takes a chunk that ends outside of media items. An item at its start is taken as a whole if the worker can
    compute that many tokens, whatever shorter limit there is."""
    budget, items = builder.budget, sequence.media
    item = item_around(items, begin + min(num_remaining, at_most, budget.remaining))
    if item is None:
        return budget.try_add(num_remaining, at_most)
    if item.offset > begin:
        return budget.try_add(item.offset - begin, at_most)
    wanted = item.end - begin
    return wanted if wanted <= num_remaining and budget.try_take_whole(wanted) else 0
