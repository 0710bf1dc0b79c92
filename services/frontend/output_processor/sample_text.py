"""Conversion of a sample's tokens to its text and parts: detokenizer, parser, stop strings.

One class for each combination, so that an unused feature costs nothing. With a parser, stop strings apply to the
content only: neither reasoning nor the markup of calls can end an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from quire.services.frontend.output_processor.answer_parser import AnswerParser, Part, append_part
from quire.services.frontend.output_processor.detokenizer import Detokenizer, new_detokenizer, prime_window
from quire.services.frontend.output_processor.parsing.events import Content
from quire.services.frontend.output_processor.stop_strings import StopStrings
from quire.services.frontend.request.request import Sampling
from quire.services.frontend.tokenizer.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """Text that some tokens produced."""

    text: str
    num_tokens: int  # number of tokens that count: those after a stop string do not
    stop: str | None  # the stop string that matched


class SampleText(Protocol):
    """Text of one sample."""

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        """Adds the tokens of one step.

        `hide_last`: the last token ended the sample (end of sequence, a stop token) and has no text.
        """

    def flush(self) -> TextPiece:
        """Returns the remaining text when no token follows."""

    def take_parts(self) -> list[Part] | None:
        """Returns the parts of the text since the last call; None without a parser."""


class Unparsed:
    """Base of texts that are not parsed."""

    __slots__ = ()

    def take_parts(self) -> list[Part] | None:
        return None


class NoText(Unparsed):
    """No text at all, for detokenize=False."""

    __slots__ = ()

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        return TextPiece("", len(token_ids), None)

    def flush(self) -> TextPiece:
        return TextPiece("", 0, None)


class WholeText(Unparsed):
    """Text without stop strings that is read only at the end: decoded as a whole."""

    __slots__ = ("_decode", "_known", "_prompt_end", "_token_ids")

    def __init__(self, decode: Callable[[list[int]], str], prompt_end: Sequence[int]) -> None:
        self._decode = decode
        self._prompt_end, self._known = prime_window(decode, prompt_end)
        self._token_ids: list[int] = []

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        self._token_ids += token_ids[:-1] if hide_last else token_ids
        return TextPiece("", len(token_ids), None)

    def flush(self) -> TextPiece:
        return TextPiece(self._decode(self._prompt_end + self._token_ids)[len(self._known) :], 0, None)


class PlainText(Unparsed):
    """Text without stop strings."""

    __slots__ = ("_push", "flush_detokenizer")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._push = detokenizer.push
        self.flush_detokenizer = detokenizer.flush

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        visible_ids = token_ids[:-1] if hide_last else token_ids
        text = self._push(visible_ids[0]) if len(visible_ids) == 1 else "".join(map(self._push, visible_ids))
        return TextPiece(text, len(token_ids), None)

    def flush(self) -> TextPiece:
        return TextPiece(self.flush_detokenizer(), 0, None)


class StoppingText(Unparsed):
    """Text with stop strings, which apply from the token after `min_tokens` on."""

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        """Detokenizes up to the first stop string, or all tokens. Stop strings are ignored for the first min_tokens
        tokens."""
        parts = []
        visible_ids = token_ids[:-1] if hide_last else token_ids
        for position, token_id in enumerate(visible_ids, start=1):
            self._num_tokens += 1
            may_stop = self._num_tokens > self._min_tokens
            text, stop = self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop)
            parts.append(text)
            if stop is not None:
                return TextPiece("".join(parts), position, stop)
        return TextPiece("".join(parts), len(token_ids), None)

    def flush(self) -> TextPiece:
        text, stop = self._stops.push(self._detokenizer.flush(), may_stop=self._num_tokens > self._min_tokens)
        return TextPiece(text + self._stops.flush(), 0, stop)


class ParsedText:
    """Text that is parsed, without stop strings; the parser runs when the parts are read."""

    __slots__ = ("_has_ended", "_parser", "_text", "_unread")

    def __init__(self, text: SampleText, parser: AnswerParser) -> None:
        self._text = text
        self._parser = parser
        self._unread: list[str] = []
        self._has_ended = False

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        piece = self._text.push(token_ids, hide_last)
        self._unread.append(piece.text)
        return piece

    def flush(self) -> TextPiece:
        """Returns the held text and marks the end, so that the next `take_parts` finishes the parser."""
        piece = self._text.flush()
        self._unread.append(piece.text)
        self._has_ended = True
        return piece

    def take_parts(self) -> list[Part] | None:
        """Parses the text since the last call and returns its parts; after `flush` the held ones as well."""
        parts = self._parser.push("".join(self._unread))
        self._unread = []
        if self._has_ended:
            self._has_ended = False
            for part in self._parser.finish():
                append_part(parts, part)
        return parts


class StoppingParts:
    """Text that is parsed token by token, with stop strings in the content; `text` stays as the model wrote it.

    Contents before and after reasoning or a call are separate texts: no stop string matches across them.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_parser", "_parts", "_stops")

    def __init__(self, detokenizer: Detokenizer, parser: AnswerParser, stops: StopStrings, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._parts: list[Part] = []

    def push(self, token_ids: list[int], hide_last: bool) -> TextPiece:
        """Detokenizes and parses token by token, up to the first stop string in the content, or all tokens."""
        texts = []
        visible_ids = token_ids[:-1] if hide_last else token_ids
        for position, token_id in enumerate(visible_ids, start=1):
            self._num_tokens += 1
            texts.append(self._detokenizer.push(token_id))
            stop = self._find_stop(self._parser.push(texts[-1]))
            if stop is not None:
                return TextPiece("".join(texts), position, stop)
        return TextPiece("".join(texts), len(token_ids), None)

    def flush(self) -> TextPiece:
        """Finishes detokenizer and parser and returns the held text, with the stop string if one completes there."""
        text = self._detokenizer.flush()
        stop = self._find_stop(self._parser.push(text) + self._parser.finish())
        if stop is None:
            self._add_content(self._stops.flush())
        return TextPiece(text, 0, stop)

    def take_parts(self) -> list[Part] | None:
        parts, self._parts = self._parts, []
        return parts

    def _find_stop(self, parts: list[Part]) -> str | None:
        """Collects the parts and returns the first stop string in their content, which drops the parts after it;
        None without one."""
        for part in parts:
            if not isinstance(part, Content):
                self._add_content(self._stops.flush())
                append_part(self._parts, part)
                continue
            text, stop = self._stops.push(part.text, may_stop=self._num_tokens > self._min_tokens)
            self._add_content(text)
            if stop is not None:
                return stop
        return None

    def _add_content(self, text: str) -> None:
        if text:
            append_part(self._parts, Content(text))


def new_text(
    sampling: Sampling,
    tokenizer: Tokenizer,
    *,
    final_only: bool,
    prompt_end: Sequence[int] = (),
    shown: frozenset[str] = frozenset(),
    parser: AnswerParser | None = None,
) -> SampleText:
    """Returns the text of a new sample.

    `prompt_end`: the prompt's last tokens; `shown`: special tokens that are never skipped; `parser`: parser of the
    answer, if any.
    """
    if sampling.stop and sampling.detokenize:
        return _stopping(sampling, _detokenizer(sampling, tokenizer, prompt_end, shown), parser)
    text = _unstopped(sampling, tokenizer, final_only, prompt_end, shown)
    return text if parser is None else ParsedText(text, parser)


def _stopping(sampling: Sampling, detokenizer: Detokenizer, parser: AnswerParser | None) -> SampleText:
    """Returns the text of a sample with stop strings, which apply to the content alone if there is a parser."""
    stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
    if parser is None:
        return StoppingText(detokenizer, stops, sampling.min_tokens)
    return StoppingParts(detokenizer, parser, stops, sampling.min_tokens)


def _unstopped(
    sampling: Sampling, tokenizer: Tokenizer, final_only: bool, prompt_end: Sequence[int], shown: frozenset[str]
) -> SampleText:
    """Returns the text of a sample without stop strings and parser: none, decoded once at the end, or incremental."""
    if not sampling.detokenize:
        return NoText()
    if final_only and sampling.spaces_between_special_tokens:
        decode = partial(tokenizer.decode, skip_special_tokens=sampling.skip_special_tokens, shown=shown)
        return WholeText(decode, () if tokenizer.byte_level else prompt_end)
    return PlainText(_detokenizer(sampling, tokenizer, prompt_end, shown))


def _detokenizer(
    sampling: Sampling, tokenizer: Tokenizer, prompt_end: Sequence[int], shown: frozenset[str]
) -> Detokenizer:
    """Returns the incremental detokenizer for the sampling parameters; `shown` are special tokens that are never
    skipped."""
    return new_detokenizer(
        tokenizer,
        prompt_end=prompt_end,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        shown=shown,
    )
