"""From a sample's tokens to its text: detokenizer, then stop strings. Four kinds: nobody pays for what is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from services.frontend.output_processor.detokenizer import Detokenizer, new_detokenizer, primed
from services.frontend.output_processor.stop_strings import StopStrings
from services.frontend.request.request import Sampling
from services.frontend.tokenizer.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """What some tokens gave."""

    text: str
    num_tokens: int  # how many of them count: those behind a stop string do not
    stop: str | None  # the stop string that matched


class SampleText(Protocol):
    """One per sample."""

    def push(self, token_ids: list[int], silent_last: bool) -> TextPiece:
        """`silent_last`: the last token ended the sample (end of sequence, a stop token) and has no text."""

    def flush(self) -> TextPiece:
        """What is left when no token follows."""


class NoText:
    """detokenize=False."""

    def push(self, token_ids: list[int], silent_last: bool) -> TextPiece:
        return TextPiece("", len(token_ids), None)

    def flush(self) -> TextPiece:
        return TextPiece("", 0, None)


class WholeText:
    """Read at the end only, without stop strings: decoded in one go."""

    __slots__ = ("_decode", "_known", "_prompt_end", "_token_ids")

    def __init__(self, decode: Callable[[list[int]], str], prompt_end: Sequence[int]) -> None:
        self._decode = decode
        self._prompt_end, self._known = primed(decode, prompt_end)
        self._token_ids: list[int] = []

    def push(self, token_ids: list[int], silent_last: bool) -> TextPiece:
        self._token_ids += token_ids[:-1] if silent_last else token_ids
        return TextPiece("", len(token_ids), None)

    def flush(self) -> TextPiece:
        return TextPiece(self._decode(self._prompt_end + self._token_ids)[len(self._known) :], 0, None)


class PlainText:
    """Without stop strings."""

    __slots__ = ("_push", "flush_detokenizer")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._push = detokenizer.push
        self.flush_detokenizer = detokenizer.flush

    def push(self, token_ids: list[int], silent_last: bool) -> TextPiece:
        spoken = token_ids[:-1] if silent_last else token_ids
        text = self._push(spoken[0]) if len(spoken) == 1 else "".join(map(self._push, spoken))
        return TextPiece(text, len(token_ids), None)

    def flush(self) -> TextPiece:
        return TextPiece(self.flush_detokenizer(), 0, None)


class StoppingText:
    """With stop strings, which count from the token after `min_tokens` on."""

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: list[int], silent_last: bool) -> TextPiece:
        parts = []
        spoken = token_ids[:-1] if silent_last else token_ids
        for position, token_id in enumerate(spoken, start=1):
            self._num_tokens += 1
            armed = self._num_tokens > self._min_tokens
            text, stop = self._stops.push(self._detokenizer.push(token_id), armed=armed)
            parts.append(text)
            if stop is not None:
                return TextPiece("".join(parts), position, stop)
        return TextPiece("".join(parts), len(token_ids), None)

    def flush(self) -> TextPiece:
        text, stop = self._stops.push(self._detokenizer.flush(), armed=self._num_tokens > self._min_tokens)
        return TextPiece(text + self._stops.flush(), 0, stop)


def new_text(
    sampling: Sampling,
    tokenizer: Tokenizer,
    *,
    final_only: bool,
    prompt_end: Sequence[int] = (),
    shown: frozenset[str] = frozenset(),
) -> SampleText:
    """`prompt_end`: the prompt's last tokens; `shown`: special tokens that are not skipped in any case."""
    if not sampling.detokenize:
        return NoText()
    if final_only and not sampling.stop and sampling.spaces_between_special_tokens:
        decode = partial(tokenizer.decode, skip_special_tokens=sampling.skip_special_tokens, shown=shown)
        return WholeText(decode, () if tokenizer.byte_level else prompt_end)
    detokenizer = new_detokenizer(
        tokenizer,
        prompt_end=prompt_end,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        shown=shown,
    )
    if not sampling.stop:
        return PlainText(detokenizer)
    stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
    return StoppingText(detokenizer, stops, sampling.min_tokens)
