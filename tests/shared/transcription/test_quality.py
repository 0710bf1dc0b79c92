"""Repetitions and guesses are tried again; silence is not."""

from __future__ import annotations

import pytest

from quire.shared.transcription.quality import QualityRules, compression_ratio

RULES = QualityRules()


def test_repetitions_compress_more_than_speech() -> None:
    speech = (
        "The sun rises in the east and sets in the west. This simple fact has been observed for thousands of years."
    )
    assert compression_ratio(speech) < 1.6
    # whisper.cpp#1724, #2040: music or silence becomes one sentence, again and again
    assert compression_ratio("Thanks for watching! " * 20) > 2.4
    assert compression_ratio("谢谢观看" * 30) > 2.4
    assert compression_ratio("") == 0


@pytest.mark.parametrize(
    ("text", "logprob", "no_speech", "is_accepted"),
    [
        ("A plain sentence.", -0.3, 0.01, True),
        ("Thanks for watching! " * 20, -0.1, 0.01, False),
        ("A guess.", -1.2, 0.2, False),
        ("A guess.", -1.2, 0.7, True),
        ("A plain sentence.", -0.3, 0.9, True),
        ("A guess.", -1.2, None, False),
    ],
)
def test_rules(text: str, logprob: float, no_speech: float | None, is_accepted: bool) -> None:
    assert RULES.is_accepted(text, logprob, no_speech) is is_accepted


def test_silence_needs_both_signs() -> None:
    assert RULES.is_silence(-1.2, 0.7)
    assert not RULES.is_silence(-0.3, 0.9)
    assert not RULES.is_silence(-1.2, None)


def test_a_text_that_no_attempt_is_sure_of_is_a_guess_about_music() -> None:
    """whisper.cpp#1724: "Thank you." for a saxophone; the model gives no speech a probability of 0.36."""
    rules = QualityRules()
    assert rules.is_guess(-1.7, 0.36)
    assert not rules.is_guess(-0.5, 0.36)
    assert not rules.is_guess(-1.7, 0.08)
    assert not rules.is_guess(-1.7, None)


def test_few_words_for_much_sound_are_sparse() -> None:
    rules = QualityRules()
    assert rules.is_sparse(2, 9.0)
    assert not rules.is_sparse(9, 9.0)
    assert not rules.is_sparse(0, 0.8)
