"""`quire transcribe`: formats, progress, and arguments that do not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.transcribe import formatted, progress_line, shown_progress
from quire.shared.transcription.transcript import Segment, Transcript
from quire.transcriptions import TranscriptDelta

SAID = Transcript([Segment(0.0, 1.5, "Grüße,"), Segment(1.5, 3.0, "wo seid ihr?")], "Grüße, wo seid ihr?", "de", 3.0)


def test_formats() -> None:
    assert formatted(SAID, "text") == "Grüße, wo seid ihr?\n"
    assert formatted(SAID, "srt").startswith("1\n00:00:00,000 --> 00:00:01,500\nGrüße,\n")
    assert formatted(SAID, "vtt").startswith("WEBVTT\n\n00:00:00.000 --> ")
    assert json.loads(formatted(SAID, "json"))["text"] == SAID.text
    assert "Grüße" in formatted(SAID, "json"), "text stays readable"
    assert [each["end"] for each in json.loads(formatted(SAID, "verbose_json"))["segments"]] == [1.5, 3.0]


def test_the_line_of_progress() -> None:
    assert progress_line("talk.mp3", 750.0, 1500.0) == "talk.mp3: [############............]  50% 12:30 of 25:00"
    assert progress_line("x", 0.0, 0.0).endswith("100% 0:00 of 0:00"), "an empty file is done"
    assert progress_line("x", 31.0, 30.0).endswith("100% 0:31 of 0:30"), "never beyond the end"


def test_progress_is_drawn_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    part, empty = TranscriptDelta("a", SAID.segments, 6.0), TranscriptDelta("", [], 6.0)
    with shown_progress("talk.mp3", is_terminal=False) as show:
        assert show(part) is part
    assert capsys.readouterr().err == ""
    with shown_progress("talk.mp3", is_terminal=True) as show:
        show(part)
        show(empty)
    drawn = capsys.readouterr().err.split("\r\x1b[K")
    assert drawn[0] == "talk.mp3: reading"
    assert drawn[1] == drawn[2] == progress_line("talk.mp3", 3.0, 6.0)
    assert drawn[-1] == "", "the line is removed"


def test_several_files_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.wav", "b.wav")]
    assert main(["transcribe", *files, "--output", str(tmp_path / "all.txt")]) == 1
    assert "is no folder, which 2 files need; create it first" in capsys.readouterr().err
    assert main(["transcribe", *files, "--format", "srt"]) == 1
    assert "subtitles of 2 files need a folder; name one with --output" in capsys.readouterr().err
