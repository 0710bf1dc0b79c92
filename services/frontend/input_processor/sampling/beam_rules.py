"""Rules of beam search and the parameters that it excludes."""

from __future__ import annotations

from functools import partial

from quire.services.frontend.input_processor.sampling.rule import Rule
from quire.services.frontend.request.request import BeamSearch, Sampling
from quire.shared.errors import InvalidArgument

MAX_BEAMS = 128
MAX_LENGTH_PENALTY = 32  # the longest context to this power is still a finite number
PART = "beam_search"
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
    assert sampling.beam_search is not None, "the rules apply to searches alone"
    return sampling.beam_search


def _goes_along(field: str, sampling: Sampling) -> bool:
    """Returns whether `field` is at its default or empty, as a beam search requires."""
    value = getattr(sampling, field)
    return bool(value == getattr(UNASKED, field) or value == [])


RULES = (
    Rule(
        "beam_search",
        lambda s: 1 <= _search(s).width <= MAX_BEAMS,
        f"beam_search: width must be in [1, {MAX_BEAMS}], got {{s.beam_search.width}}.",
        PART,
    ),
    Rule(
        "beam_search",
        lambda s: s.n <= _search(s).width,
        "beam_search: n must be at most width={s.beam_search.width}, got {s.n}.",
        PART,
    ),
    Rule(
        "length_penalty",
        lambda s: -MAX_LENGTH_PENALTY <= _search(s).length_penalty <= MAX_LENGTH_PENALTY,
        f"length_penalty must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], "
        "got {s.beam_search.length_penalty}.",
        PART,
    ),
    *(
        Rule(field, partial(_goes_along, field), f"{field} is not supported together with beam search.", PART)
        for field in NOT_WITH_BEAMS
    ),
)


def check_logprobs(sampling: Sampling) -> None:
    """Raises InvalidArgument if a beam search asks for more logprobs than its 2 * width candidate tokens."""
    width, logprobs = _search(sampling).width, sampling.logprobs
    if logprobs is not None and not 0 <= logprobs <= 2 * width:
        text = f"logprobs must be in [0, {2 * width}] with a beam search of width {width}, got {logprobs}."
        raise InvalidArgument(text, field="logprobs")
