"""The examples of the page about transcription run as they stand."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.page import TRANSCRIPTION, output_of
from tests.e2e.sound.served import RATE, Served
from tests.shared.media.audio.files import noise, wav

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("text", "output", "needs"),
    [
        ("curl -N", r'data: \{"type":"transcript.text.done"', None),
        ("openai.OpenAI", r"1\n00:00:00,\d{3} --> ", None),
        ("transcribe.mjs", r"[\d.]+ [\d.]+ \S", "node"),
        ("stream_transcription", r"^\d\.\d\d \d\.\d\d \S", None),
        ("websockets.sync.client", r"\S", "websockets"),
    ],
)
def test_the_example_runs(served: Served, tmp_path: Path, text: str, output: str, needs: str | None) -> None:
    if needs is not None and shutil.which(needs) is None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"requires {needs}")
    (tmp_path / "speech.wav").write_bytes(wav(noise(14_000), RATE))
    found = output_of(text, served.base_url, tmp_path, TRANSCRIPTION, served.cluster.grpc_address)
    assert re.search(output, found), found
