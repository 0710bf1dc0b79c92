"""Time stamps of Whisper become segments without lost text, whatever the model wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.transcription.timestamps import WhisperVocabulary, segments_of

# Ids of the multilingual tokenizer of Whisper, those of the English one, and those of large-v3.
MULTILINGUAL = {
    "<|endoftext|>": 50257, "<|startoftranscript|>": 50258, "<|en|>": 50259, "<|zh|>": 50260, "<|haw|>": 50352,
    "<|translate|>": 50358, "<|transcribe|>": 50359, "<|startofprev|>": 50361, "<|nocaptions|>": 50362,
    "<|notimestamps|>": 50363,
}  # fmt: skip
ENGLISH = {  # with languages that the model does not know
    "<|endoftext|>": 50256, "<|startoftranscript|>": 50257, "<|en|>": 50258, "<|translate|>": 50357,
    "<|transcribe|>": 50358, "<|startofprev|>": 50360, "<|nospeech|>": 50361,
    "<|notimestamps|>": 50362,
}  # fmt: skip
LARGE_V3 = {
    **MULTILINGUAL,
    "<|yue|>": 50358,
    "<|translate|>": 50359,
    "<|transcribe|>": 50360,
    "<|notimestamps|>": 50364,
}
VOCABULARY = WhisperVocabulary.of(MULTILINGUAL)


def decode(tokens: Sequence[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def at(seconds: float) -> int:
    return VOCABULARY.first_timestamp + round(seconds / 0.02)


def spans(tokens: Sequence[int], piece_s: float = 30.0, offset_s: float = 0.0) -> list[tuple[float, float, str]]:
    found = segments_of(tokens, VOCABULARY, decode, piece_s, offset_s)
    return [(round(one.start, 2), round(one.end, 2), one.text) for one in found]


def test_ids_of_the_three_kinds_of_tokenizers() -> None:
    assert VOCABULARY.first_timestamp == 50364
    assert VOCABULARY.languages == {"en": 50259, "zh": 50260, "haw": 50352}
    assert (VOCABULARY.transcribe, VOCABULARY.translate, VOCABULARY.no_speech) == (50359, 50358, 50362)
    english = WhisperVocabulary.of(ENGLISH)
    assert (english.start, english.first_timestamp, english.languages, english.transcribe) == (50257, 50363, {}, 50358)
    assert english.no_speech == 50361
    assert WhisperVocabulary.of(LARGE_V3).first_timestamp == 50365
    assert WhisperVocabulary.of({**LARGE_V3, "<|0.00|>": 50365}).languages["yue"] == 50358
    with pytest.raises(InvalidArgument, match="<|startoftranscript|> is not a token".replace("|", r"\|")):
        WhisperVocabulary.of({"<|endoftext|>": 0})


def test_times_of_tokens() -> None:
    assert VOCABULARY.time_of(50364) == 0
    assert VOCABULARY.time_of(50364 + 1500) == 30.0
    assert VOCABULARY.time_of(50364 + 1501) is None
    assert VOCABULARY.time_of(50363) is None


def test_pairs_of_time_stamps_are_segments() -> None:
    tokens = [at(0), 1, 2, at(2.5), at(2.5), 3, at(4), at(5.2), 4, at(7), 50257, 9]
    assert spans(tokens, offset_s=60) == [(60, 62.5, "w1 w2"), (62.5, 64, "w3"), (65.2, 67, "w4")]


def test_words_after_the_last_time_stamp_are_kept() -> None:
    """vllm#58029: verbose_json lost the words after the last whole segment at every cut."""
    assert spans([at(0), 1, at(20), at(20), 2, 3], 29.3) == [(0, 20, "w1"), (20, 29.3, "w2 w3")]
    assert spans([1, 2, 3], 12.0) == [(0, 12, "w1 w2 w3")]


def test_times_rise_and_lie_within_the_piece() -> None:
    """lhotse#891: a segment from 99.92 s to 90.72 s; faster-whisper#1334: the last one ends after the file."""
    assert spans([at(9.92), 1, at(0.72), at(0.5), 2, at(11)]) == [(9.92, 9.92, "w1"), (9.92, 11, "w2")]
    assert spans([at(25.46), 1, at(30)], 29.9) == [(25.46, 29.9, "w1")]


def test_segments_without_text_are_left_out() -> None:
    """Const-me/Whisper#203: hundreds of cues without a text at one time."""
    assert spans([at(0), at(0), at(3), at(3), 5, at(4), at(4), at(4)]) == [(3, 4, "w5")]
    assert segments_of([at(0), 7, at(1)], VOCABULARY, lambda _: "  ", 30.0) == []


def test_random_tokens_lose_no_text_and_have_rising_times() -> None:
    generator = np.random.default_rng(1)
    for _ in range(300):
        is_time = generator.random(20) < 0.4
        tokens = np.where(is_time, at(0) + generator.integers(0, 1501, 20), generator.integers(0, 100, 20)).tolist()
        found = segments_of(tokens, VOCABULARY, decode, 28.0)
        assert [token for one in found for token in one.token_ids] == [token for token in tokens if token < 50257]
        times = [time for one in found for time in (one.start, one.end)]
        assert times == sorted(times)
        assert all(0 <= time <= 28 for time in times)
