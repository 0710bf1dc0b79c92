"""Which workers compute a prompt, and which go on with it. Pure."""

from __future__ import annotations

from quire.services.scheduler.core.sequences.sequence import Sequence

PREFILL, DECODE = "prefill", "decode"
LOAD = 4  # times as much work as it would be with the decoders: so long prompts wait for a prefill worker


def can_be_handed_over(sequence: Sequence) -> bool:
    """Samples of one prompt share its blocks where it is computed, searches stay together, a vector needs nobody to go
    on, and log-probabilities of a prompt come from the worker that computes it, as does what must not read a cache."""
    stays = (
        sequence.sample_group is not None or sequence.search is not None or sequence.is_beam or sequence.samples_nothing
    )
    return not (stays or sequence.asks_prompt_logprobs or sequence.skip_reading_prefix_cache)


def should_use_prefill_worker(*, uncached: int, decoder_work: int, prefill_work: int, threshold: int) -> bool:
    """Whether a prompt with so many tokens to compute goes to a prefill worker. `decoder_work`, `prefill_work`: tokens
    to be computed there before it has its first, its own included."""
    return uncached >= threshold and prefill_work <= LOAD * decoder_work
