"""Time stamps among the tokens of Whisper (arXiv 2212.04356): their vocabulary, and the segments that they mark."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.shared.errors import InvalidArgument
from quire.shared.transcription.transcript import Segment

STEP_S, LAST_S = 0.02, 30.0
ZERO = "<|0.00|>"
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
START, END_OF_TEXT, PREVIOUS = "<|startoftranscript|>", "<|endoftext|>", "<|startofprev|>"
TRANSCRIBE, TRANSLATE, NO_TIMESTAMPS = "<|transcribe|>", "<|translate|>", "<|notimestamps|>"
GPT2_END_OF_TEXT = 50_256  # in the vocabulary of models that know English only; others have one token more before it
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")


@dataclass(frozen=True, slots=True)
class WhisperVocabulary:
    """Ids of Whisper's special tokens, which differ between versions."""

    start: int
    end_of_text: int
    no_timestamps: int
    first_timestamp: int  # of 0.00 s
    languages: Mapping[str, int]  # by ISO 639 code; empty: English only
    transcribe: int | None = None
    translate: int | None = None
    previous: int | None = None  # precedes text of what was said before
    no_speech: int | None = None

    @classmethod
    def of(cls, tokens: Mapping[str, int]) -> WhisperVocabulary:
        """Finds them among the added tokens of a tokenizer. Raises InvalidArgument if it is not one of Whisper."""
        missing = [text for text in (START, END_OF_TEXT, NO_TIMESTAMPS) if text not in tokens]
        if missing:
            text = f"tokenizer.json: {missing[0]} is not a token; a tokenizer of Whisper is needed"
            raise InvalidArgument(text, field="model")
        found = {match[1]: id_ for text, id_ in tokens.items() if (match := LANGUAGE.fullmatch(text))}
        is_english = tokens[END_OF_TEXT] == GPT2_END_OF_TEXT  # its tokenizer lists languages as well
        no_timestamps = tokens[NO_TIMESTAMPS]
        return cls(
            start=tokens[START],
            end_of_text=tokens[END_OF_TEXT],
            no_timestamps=no_timestamps,
            first_timestamp=tokens.get(ZERO, no_timestamps + 1),
            languages={} if is_english or TRANSLATE not in tokens else found,
            transcribe=tokens.get(TRANSCRIBE),
            translate=tokens.get(TRANSLATE),
            previous=tokens.get(PREVIOUS),
            no_speech=next((tokens[text] for text in NO_SPEECH if text in tokens), None),
        )

    def time_of(self, token: int) -> float | None:
        """Returns the time that a token stands for, in seconds; None for tokens of text."""
        number = token - self.first_timestamp
        return round(number * STEP_S, 2) if 0 <= number <= round(LAST_S / STEP_S) else None

    def token_of(self, seconds: float) -> int:
        """Returns the token of a time, the nearest that there is."""
        return self.first_timestamp + round(min(max(seconds, 0.0), LAST_S) / STEP_S)


def segments_of(
    tokens: Sequence[int],
    vocabulary: WhisperVocabulary,
    decode: Callable[[Sequence[int]], str],
    piece_s: float,
    offset_s: float = 0.0,
) -> list[Segment]:
    """Returns the segments that the time stamps in `tokens` mark, with all text: what follows the last time stamp is a
    segment to the end of the piece. Times rise and lie within the piece, whatever the model wrote.

    `decode`: text of tokens; `piece_s`: length of the piece of sound; `offset_s`: its start in the file."""
    found: list[Segment] = []
    start, text_tokens = 0.0, list[int]()

    def close(end: float) -> None:
        """Ends the segment of the collected tokens at `end`, and begins the next one there."""
        nonlocal start
        end = min(max(end, start), piece_s)
        if text := decode(text_tokens).strip():
            found.append(Segment(offset_s + start, offset_s + end, text, tuple(text_tokens)))
        text_tokens.clear()
        start = end

    for token in tokens:
        time = vocabulary.time_of(token)
        if token == vocabulary.end_of_text:
            break
        if time is None:
            text_tokens.append(token)
        elif text_tokens:
            close(time)
        else:
            start = min(max(time, start), piece_s)  # begin of the next segment
    if text_tokens:
        close(piece_s)
    return found
