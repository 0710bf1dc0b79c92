"""Transcripts are written so that players and clients read them."""

from __future__ import annotations

import re

from quire.shared.transcription.formats import as_json, as_srt, as_text, as_verbose_json, as_vtt
from quire.shared.transcription.transcript import Segment, Transcript, Word

FIRST = Segment(0.0, 2.58, "The sun rises.", (1, 2))
SECOND = Segment(3661.02, 3663.9996, "Tom & <Jerry>\n\nrun --> away", (3,), temperature=0.2, no_speech_prob=0.1)
TRANSCRIPT = Transcript([FIRST, Segment(2.6, 2.6, " \n"), SECOND], "The sun rises. They run", "en", 3664.2)


def test_srt_has_numbers_from_one_hours_and_one_line_a_cue() -> None:
    """WhisperTimeSync#17: empty cues broke players; an empty line within a cue ends it."""
    assert as_srt(TRANSCRIPT) == (
        "1\n00:00:00,000 --> 00:00:02,580\nThe sun rises.\n\n"
        "2\n01:01:01,020 --> 01:01:04,000\nTom & <Jerry> run -> away\n"
    )


def test_vtt_has_one_header_and_no_markup() -> None:
    """whisper-timestamped#190: the header stood there twice; openai/whisper#219: hours were missing."""
    written = as_vtt(TRANSCRIPT)
    assert written == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.580\nThe sun rises.\n\n"
        "01:01:01.020 --> 01:01:04.000\nTom &amp; &lt;Jerry&gt; run -&gt; away\n"
    )
    assert len(re.findall("WEBVTT", written)) == 1


def test_no_speech_is_an_empty_file() -> None:
    nothing = Transcript([], "", "en", 40.0)
    assert as_srt(nothing) == ""
    assert as_vtt(nothing) == "WEBVTT\n"
    assert as_text(nothing) == "\n"
    assert as_json(nothing) == {"text": "", "usage": {"type": "duration", "seconds": 40}}


def test_json_counts_begun_seconds() -> None:
    assert as_json(TRANSCRIPT)["usage"] == {"type": "duration", "seconds": 3665}
    assert as_text(TRANSCRIPT) == "The sun rises. They run\n"


def test_verbose_json_has_what_was_asked_for() -> None:
    answer = as_verbose_json(TRANSCRIPT)
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "en", 3664.2)
    assert answer["segments"][0] == {
        "id": 0, "seek": 0, "start": 0.0, "end": 2.58, "text": "The sun rises.", "tokens": [1, 2], "temperature": 0.0,
        "avg_logprob": 0.0, "compression_ratio": answer["segments"][0]["compression_ratio"], "no_speech_prob": None,
    }  # fmt: skip
    assert "words" not in answer


def test_words_are_in_verbose_json_and_subtitles_only_if_asked_for() -> None:
    """LocalAI#9306, speaches#639: `words` was null although words were asked for; openai#157 of a Dart client: both
    granularities together."""
    words = (Word(0.1, 0.50004, "The"), Word(0.5, 1.2, "sun"))
    transcript = Transcript([Segment(0.1, 1.2, "The sun", (1, 2), words=words)], "The sun", "en", 3.0)
    both = as_verbose_json(transcript, has_words=True)
    assert both["words"] == [{"word": "The", "start": 0.1, "end": 0.5}, {"word": "sun", "start": 0.5, "end": 1.2}]
    assert len(both["segments"]) == 1
    assert "segments" not in as_verbose_json(transcript, has_words=True, has_segments=False)
    assert "words" not in as_verbose_json(transcript)
    assert as_srt(transcript, by_word=True).startswith("1\n00:00:00,100 --> 00:00:00,500\nThe\n\n2\n")
    assert "00:00:00.500 --> 00:00:01.200\nsun\n" in as_vtt(transcript, by_word=True)
