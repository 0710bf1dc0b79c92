"""Rules of beam search and the parameters that it excludes."""

from __future__ import annotations

from functools import partial

from quire.services.frontend.input_processor.sampling.rule import Rule
from quire.services.frontend.request.request import BeamSearch, Sampling
from quire.shared.errors import InvalidArgument

MAX_BEAMS = 128
MAX_LENGTH_PENALTY = 32  # the longest context to this power is still a finite number
NO_SEARCH = BeamSearch(1)  # satisfies every rule
UNASKED = Sampling()

# These would have to follow a beam from slot to slot, or need the text while it is generated.
NOT_WITH_BEAMS = (
    "bad_words",
    "logits_processors",
    "stop",
    "repetition_detection",
    "thinking_token_budget",
    "structured_output",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "logprob_token_ids",
)


def _search(sampling: Sampling) -> BeamSearch:
    return sampling.beam_search or NO_SEARCH


def _goes_along(field: str, sampling: Sampling) -> bool:
    """Returns whether `field` may keep its value: there is no beam search, or the field is at its default or empty."""
    if sampling.beam_search is None:
        return True
    value = getattr(sampling, field)
    return bool(value == getattr(UNASKED, field) or value == [])


RULES = (
    Rule(
        "beam_search",
        lambda s: 1 <= _search(s).width <= MAX_BEAMS,
        f"beam_search: width must be in [1, {MAX_BEAMS}], got {{s.beam_search.width}}.",
    ),
    Rule(
        "beam_search",
        lambda s: s.beam_search is None or s.n <= s.beam_search.width,
        "beam_search: n must be at most width={s.beam_search.width}, got {s.n}.",
    ),
    Rule(
        "length_penalty",
        lambda s: -MAX_LENGTH_PENALTY <= _search(s).length_penalty <= MAX_LENGTH_PENALTY,
        f"length_penalty must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], "
        "got {s.beam_search.length_penalty}.",
    ),
    *(
        Rule(field, partial(_goes_along, field), f"{field} is not supported together with beam search.")
        for field in NOT_WITH_BEAMS
    ),
)


def check_logprobs(sampling: Sampling) -> None:
    """Raises InvalidArgument if a beam search asks for more logprobs than its 2 * width candidate tokens."""
    if sampling.beam_search is None or sampling.logprobs is None:
        return
    width, logprobs = sampling.beam_search.width, sampling.logprobs
    if not 0 <= logprobs <= 2 * width:
        text = f"logprobs must be in [0, {2 * width}] with a beam search of width {width}, got {logprobs}."
        raise InvalidArgument(text, field="logprobs")
