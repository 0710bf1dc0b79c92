"""Rules for computing a prompt on a prefill worker and continuing on a decode worker. Pure."""

from __future__ import annotations

from quire.services.scheduler.core.sequences.sequence import Sequence

PREFILL, DECODE = "prefill", "decode"
MAX_LOAD_RATIO = (
    4  # maximum ratio of a prefill worker's load to the decode workers': up to it, prompts wait for a prefill worker
)


def can_be_handed_over(sequence: Sequence) -> bool:
    """Returns whether a sequence can be handed over. Samples of one prompt share its blocks on one worker, beam
    searches stay together, pooling sequences need no decoding, log-probabilities of a prompt come from the worker that
    computes it, and sequences that skip the cache cannot use handed-over blocks."""
    stays = (
        sequence.sample_group is not None or sequence.search is not None or sequence.is_beam or sequence.samples_nothing
    )
    return not (stays or sequence.asks_prompt_logprobs or sequence.skip_reading_prefix_cache)


def should_use_prefill_worker(*, uncached: int, decoder_work: int, prefill_work: int, threshold: int) -> bool:
    """Returns whether a prompt with `uncached` tokens goes to a prefill worker. `decoder_work`, `prefill_work`: tokens
    to be computed there before its first token, its own included."""
    return uncached >= threshold and prefill_work <= MAX_LOAD_RATIO * decoder_work
