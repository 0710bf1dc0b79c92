"""`quire transcribe` against a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from tests.e2e.sound.served import ONCE, Served, floats
from tests.shared.media.audio.files import noise

pytestmark = pytest.mark.timeout(300)


def test_files_become_text_and_subtitles(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sounds = [tmp_path / name for name in ("first.wav", "second.wav")]
    for seed, sound in enumerate(sounds):
        sound.write_bytes(floats(noise(9_000, seed=seed)))
    given = ["--address", served.cluster.grpc_address, "--language", "en", "--temperature", ONCE]
    texts = [served.send(sound.read_bytes(), language="en").json()["text"] for sound in sounds]
    assert main(["transcribe", *map(str, sounds), *given]) == 0
    assert capsys.readouterr() == (f"{texts[0]}\n{texts[1]}\n", ""), "no bar without a terminal"
    folder = tmp_path / "subtitles"
    folder.mkdir()
    assert main(["transcribe", *map(str, sounds), *given, "--format", "srt", "--output", str(folder)]) == 0
    srt = served.send(sounds[0].read_bytes(), language="en", response_format="srt").text
    assert (folder / "first.srt").read_text() == srt
    assert (folder / "second.srt").read_text()
    assert main(["transcribe", str(sounds[0]), *given, "--format", "json", "--output", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["text"] == texts[0]


def test_a_broken_file_leaves_the_others(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, broken = tmp_path / "good.wav", tmp_path / "broken.wav"
    good.write_bytes(floats(noise(9_000)))
    broken.write_bytes(b"no sound")
    given = ["--address", served.cluster.grpc_address, "--language", "en", "--temperature", ONCE]
    assert main(["transcribe", str(broken), str(good), str(tmp_path / "absent.wav"), *given]) == 1
    out, err = capsys.readouterr()
    assert out == served.send(good.read_bytes(), language="en").json()["text"] + "\n"
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [str(broken), str(tmp_path / "absent.wav")]
    assert main(["transcribe", str(broken), *given]) == 1
    assert "none of wav, mp3" in capsys.readouterr().err
