"""Words of a transcript: tokens joined by the rules of the language, and their times."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.shared.transcription.joining import WITHOUT_SPACES
from quire.shared.transcription.transcript import Word

if TYPE_CHECKING:
    import numpy.typing as npt

    from quire.shared.media.audio.waveform import F32

BROKEN = "\ufffd"  # what incomplete UTF-8 is decoded to
MAX_CHARACTER_TOKENS = 4  # bytes of the longest character
OPENING = frozenset("\"'“‘¿¡([{-«„「『（《")
FRAME_S = 0.02  # of the energy by which words are trimmed
LOUD_SHARE = 0.05  # of the level of speech: frames below it are a pause, 26 dB
PAUSE_FRAMES = 15  # 0.3 s: a longer pause is in no word
EDGE_FRAMES = 5  # 0.1 s of silence that may be before and after a word
LENGTH_FACTOR, MEDIAN_S = 2.0, 0.7  # a word's length, of the median of all, which is at most this
SENTENCE_ENDS = ".。!！?？"

Decode = Callable[[Sequence[int]], str]


class WordTokens(NamedTuple):
    """Text of a word, with the space before it, and its number of tokens."""

    text: str
    num_tokens: int


def words_of(tokens: Sequence[int], decode: Decode, language: str = "") -> list[WordTokens]:
    """Joins tokens to words, each with the punctuation around it: at spaces, or character by character in languages
    that are written without. Every token belongs to one word."""
    spaced = language not in WITHOUT_SPACES
    words: list[WordTokens] = []
    for text, count in _characters(tokens, decode):
        last = words[-1] if words else None
        if last is not None and (_is_only(last.text, OPENING) or not _begins_word(text, last.text, spaced=spaced)):
            words[-1] = WordTokens(last.text + text, last.num_tokens + count)
        else:
            words.append(WordTokens(text, count))
    if len(words) > 1 and not _has_letters(words[-1].text):
        text, count = words.pop()
        words[-1] = WordTokens(words[-1].text + text, words[-1].num_tokens + count)
    return words


def _characters(tokens: Sequence[int], decode: Decode) -> Iterator[tuple[str, int]]:
    """Yields the text of one token, or of several that only together are characters, and their number."""
    start = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[start:end])
        if BROKEN not in text or end - start == MAX_CHARACTER_TOKENS or end == len(tokens):
            yield text, end - start
            start = end


def _begins_word(text: str, before: str, *, spaced: bool) -> bool:
    """Returns whether a text begins a word after `before`: in languages without spaces, every character but
    punctuation does, and a run of Latin letters or digits is one word."""
    if not _has_letters(text) and not _is_only(text, OPENING):
        return False
    if spaced:
        return text[:1].isspace()
    return not (text[:1].isascii() and text[:1].isalnum() and before[-1:].isascii() and before[-1:].isalnum())


def _has_letters(text: str) -> bool:
    """Returns whether a text has anything that is spoken: a letter, a digit or a symbol."""
    return any(unicodedata.category(one)[0] in "LNSM" for one in text)


def _is_only(text: str, characters: frozenset[str]) -> bool:
    stripped = text.strip()
    return bool(stripped) and all(one in characters for one in stripped)


def timed_words(words: Sequence[WordTokens], starts_s: Sequence[float], offset_s: float) -> list[Word]:
    """Returns the words with their times: from the start of the first token to that of the token after the last one.

    `starts_s`: of each token and of the end, ascending, in seconds after `offset_s`, the start of the piece.
    """
    found, at = [], 0
    for text, count in words:
        start, end = starts_s[at], starts_s[at + count]
        at += count
        if stripped := text.strip():
            found.append(Word(offset_s + start, offset_s + end, stripped))
    return found


def trimmed_words(words: Sequence[Word], samples: F32, rate: int, offset_s: float) -> list[Word]:
    """Returns the words without the pauses that the alignment counts to them, since it knows no silence.

    `samples`: of the piece, which begins at `offset_s`.
    """
    frame = max(1, round(FRAME_S * rate))
    whole = samples[: len(samples) // frame * frame].reshape(-1, frame)
    levels = np.sqrt(np.mean(np.square(whole, dtype=np.float64), axis=1))
    if not len(levels) or not words:
        return list(words)
    loud = levels > LOUD_SHARE * np.percentile(levels, 95)
    return [_trimmed(word, loud, offset_s) for word in _with_usual_length(_without_empty(words))]


def _without_empty(words: Sequence[Word]) -> list[Word]:
    """Returns the words such that each has a time: those without share that of the word before, or the first ones that
    of the word after them, by their letters."""
    groups: list[list[Word]] = []
    for word in words:
        is_empty = word.end <= word.start
        if groups and (is_empty or all(one.end <= one.start for one in groups[-1])):
            groups[-1].append(word)
        else:
            groups.append([word])
    return [word for group in groups for word in _shared(group)]


def _shared(words: Sequence[Word]) -> list[Word]:
    """Returns words that share the time of all of them by their letters."""
    start, end = words[0].start, max(word.end for word in words)
    ends = start + (end - start) * np.cumsum([len(word.text) for word in words]) / sum(len(word.text) for word in words)
    starts = [start, *ends[:-1].tolist()]
    return [Word(begin, stop, word.text) for begin, stop, word in zip(starts, ends.tolist(), words, strict=True)]


def _with_usual_length(words: Sequence[Word]) -> list[Word]:
    """Returns the words such that the first one is not much longer than is usual, since the alignment begins with the
    piece, and that those at the end of a sentence are not, since a pause follows them."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    most = LENGTH_FACTOR * min(float(np.median(lengths)), MEDIAN_S) if len(lengths) > 1 else np.inf
    first, *others = words
    first = Word(max(first.start, first.end - most), first.end, first.text)
    return [
        first,
        *(
            Word(word.start, min(word.end, word.start + most), word.text) if word.text[-1] in SENTENCE_ENDS else word
            for word in others
        ),
    ]


def _trimmed(word: Word, loud: npt.NDArray[np.bool_], offset_s: float) -> Word:
    """Returns the word over the longest stretch of sound in its time that has no pause of more than PAUSE_FRAMES."""
    first, last = (round((time - offset_s) / FRAME_S) for time in (word.start, word.end))
    places = first + np.flatnonzero(loud[first:last])
    if not len(places):
        return word
    stretches = np.split(places, np.flatnonzero(np.diff(places) > PAUSE_FRAMES) + 1)
    longest = max(stretches, key=len)
    start = word.start if longest[0] - first < EDGE_FRAMES else offset_s + int(longest[0]) * FRAME_S
    end = word.end if last - longest[-1] <= EDGE_FRAMES else offset_s + int(longest[-1] + 1) * FRAME_S
    return Word(start, max(end, start), word.text)
