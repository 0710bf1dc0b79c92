"""Sound in requests: what workers get of it, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.shared.columns import i32
from quire.shared.media.audio.decoding import is_sound_file
from quire.shared.media.audio.log_mel import MelSettings, log_mel
from quire.shared.media.modalities import AUDIO
from quire.shared.media.registry import read_audio_processor
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.hearing import (
    BINS,
    PLACEHOLDER,
    SECONDS,
    audio_url,
    input_audio,
    write_hearing_folder,
)
from tests.services.frontend.media.seeing import Served, image, seeing_frontend, text, user
from tests.services.frontend.media.seeing_folder import plain
from tests.services.frontend.scripted_scheduler import ReceivedSubmission
from tests.shared.media.audio.files import encoded, noise, tone, wav

CHAT = "/v1/chat/completions"
RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hearing_folder(tmp_path_factory.mktemp("hearing"))


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    async with seeing_frontend(folder, limit_mm_per_prompt={AUDIO: 3}) as running:
        yield running


def shown(served: Served, submission: ReceivedSubmission) -> str:
    """Returns the text of a prompt with [N] in the places of clips of N tokens."""
    tokenizer = served.started.frontend.model.tokenizer
    ids = i32(submission.token_ids).tolist()
    found, begin = "", 0
    for item in submission.media:
        assert {tokenizer.token_name(i) for i in ids[item.offset : item.offset + item.length]} == {PLACEHOLDER}
        assert item.modality == AUDIO
        found += tokenizer.decode(ids[begin : item.offset], skip_special_tokens=False) + f"[{item.length}]"
        begin = item.offset + item.length
    return found + tokenizer.decode(ids[begin:], skip_special_tokens=False)


async def submitted(served: Served, path: str = CHAT, **body: Any) -> tuple[str, list[np.ndarray]]:
    """Asks, and returns the prompt as shown() and the features that workers fetch; the answer must succeed."""
    number = len(served.script.submissions)
    served.script.pause()
    asked = served.ask(path, **body)
    try:
        submission = await served.submission(number, asked)
        features = []
        for item in submission.media:
            head, data = await fetch_pixels(served.media_address, item.identifier)
            shape = (head.num_tiles, head.height, head.width)
            features.append(np.frombuffer(data, "<f4").reshape(shape))
        prompt = shown(served, submission)
    finally:
        served.script.resume()
    assert (await asked).status_code == 200, (await asked).text
    return prompt, features


async def test_input_audio_and_audio_url_reach_the_worker_as_features(served: Served) -> None:
    first, second = noise(8_000), noise(16_000, seed=1)
    prompt, features = await submitted(
        served, messages=user(input_audio(wav(first, RATE)), text("and"), audio_url(wav(second, RATE)), text("?"))
    )
    assert prompt.startswith(
        "<|im_start|>user\nAudio 1: <|audio_bos|>[12]<|audio_eos|>\nandAudio 2: <|audio_bos|>[25]<|audio_eos|>\n?"
    )
    for samples, found in zip((first, second), features, strict=True):
        quantized = (np.round(samples * 32767) / 32768).astype(np.float32)
        wanted = log_mel(quantized, MelSettings(BINS, chunk_seconds=SECONDS), SECONDS * RATE)
        np.testing.assert_allclose(found[0], wanted[:, : found.shape[2]], atol=1e-5)


async def test_models_list_what_they_take(served: Served) -> None:
    (model,) = (await served.started.http.get("/v1/models")).json()["data"]
    assert model["input_modalities"] == ["text", "audio"]
    shown_by_ollama = (await served.started.http.post("/api/show", json={"model": model["id"]})).json()
    assert "audio" in shown_by_ollama["capabilities"]
    assert "vision" not in shown_by_ollama["capabilities"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "input_audio", "input_audio": {}}, "need input_audio: an object"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "need input_audio: an object"),
    ({"type": "input_audio", "input_audio": {"data": "###", "format": "wav"}}, "its base64 is invalid"),
    ({"type": "audio_url", "audio_url": {}}, "need audio_url: a URL, or an object with a url"),
    ({"type": "audio_url", "audio_url": {"url": "ftp://h/a.wav"}}, "must be either a HTTP, data or file URL"),
    ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "allowed-local-media-path"),
    ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}, "allowed domains"),
    (input_audio(b"not sound at all"), "it is none of wav, mp3, flac, ogg, m4a, webm, aac; convert it"),
    (input_audio(bytes(100_000)), "it is none of wav"),
    (input_audio(wav(noise(100), RATE)[:30]), "cut off; send the complete file"),
    (input_audio(wav(noise(100), RATE)), "it lasts 0.006 s, and this model needs at least 0.020 s"),
    (input_audio(wav(noise(RATE * SECONDS + 5), RATE)), "it lasts longer than 2 s"),
    ({"type": "audio_url", "uuid": "unknown"}, "Cache miss for audio at index 0 but data is not provided"),
    (image(plain((1, 2, 3))), "text and sound only, not pictures"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "text and sound only, not videos"),
]


async def test_what_is_no_sound_is_refused(served: Served) -> None:
    for part, reason in REFUSED:
        status, body = await served.refusal(CHAT, messages=user(part, text("?")))
        assert 400 <= status < 502
        assert reason in body


async def test_too_many_clips_are_refused_with_the_flag_to_set(served: Served) -> None:
    clips = [input_audio(wav(noise(4_000), RATE))] * 4
    _, body = await served.refusal(CHAT, messages=user(*clips))
    assert "At most 3 audio(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase" in body


async def test_equal_clips_are_decoded_once_and_named_ones_are_found_again(served: Served) -> None:
    clip = wav(noise(4_000), RATE)
    await submitted(served, messages=user(input_audio(clip, uuid="clip-1"), input_audio(clip)))
    assert served.store.num_queries == 2
    assert served.store.num_hits >= 0
    prompt, _ = await submitted(served, messages=user({"type": "input_audio", "uuid": "clip-1"}, text("again")))
    assert "[6]" in prompt


async def test_a_url_in_the_place_of_base64_is_read(served: Served) -> None:
    """Clients of hosted Qwen models send URLs, plain or data:, as the data of input_audio (QwenLM/Qwen2.5-Omni)."""
    part = audio_url(wav(noise(4_000), RATE))["audio_url"]["url"]
    prompt, _ = await submitted(
        served, messages=user({"type": "input_audio", "input_audio": {"data": part, "format": "wav"}})
    )
    assert "[6]" in prompt


async def test_the_format_that_a_client_names_does_not_matter(served: Served) -> None:
    """The first bytes say what a file is: browsers name WebM recordings wav."""
    data = base64.b64encode(wav(noise(4_000), RATE)).decode()
    for form in ("mp3", "application/octet-stream", "", None, 7):
        part = {"type": "input_audio", "input_audio": {"data": data, "format": form}}
        prompt, _ = await submitted(served, messages=user(part))
        assert "[6]" in prompt


@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("webm", "libopus"), ("flac", "flac")])
@pytest.mark.parametrize("rate", [8_000, 48_000])
async def test_coded_stereo_at_other_rates(served: Served, container: str, codec: str, rate: int) -> None:
    pytest.importorskip("av")
    samples = np.repeat(tone(440, 1.0, rate)[:, None], 2, axis=1)
    prompt, (features,) = await submitted(served, messages=user(input_audio(encoded(samples, rate, container, codec))))
    assert 22 <= int(prompt.split("[")[1].split("]")[0]) <= 28
    assert features[0].mean(axis=1).argmax() < BINS // 3  # a low tone


async def test_a_header_that_claims_hours_costs_nothing(served: Served) -> None:
    file = bytearray(wav(noise(8_000), RATE))
    at = file.index(b"data") + 4
    file[at : at + 4] = (2 * 2 * 3600 * RATE).to_bytes(4, "little")
    prompt, _ = await submitted(served, messages=user(input_audio(bytes(file))))
    assert "[12]" in prompt


async def test_many_uploads_at_once_are_all_answered(served: Served) -> None:
    served.script.resume()
    bodies = [user(input_audio(wav(noise(4_000, seed=number), RATE))) for number in range(50)]
    answers = await asyncio.gather(*(served.ask(CHAT, messages=messages) for messages in bodies))
    assert {answer.status_code for answer in answers} == {200}
    assert served.store.held_bytes == 0
    served.store.check_invariants()


async def test_a_text_that_spells_the_placeholder_takes_no_clip(served: Served) -> None:
    prompt, _ = await submitted(
        served, messages=user(text(f"what is {PLACEHOLDER}?"), input_audio(wav(noise(4_000), RATE)))
    )
    assert f"what is {PLACEHOLDER}?" in prompt
    assert prompt.count("[6]") == 1


async def test_responses_take_the_parts_that_chats_take(served: Served) -> None:
    """vllm#47659: the Responses API refused input_audio, which chat completions took."""
    served.script.resume()
    items = user(input_audio(wav(noise(4_000), RATE)), {"type": "input_text", "text": "What is said?"})
    asked = await served.started.http.post("/v1/responses", json={"model": "", "input": items, "max_output_tokens": 1})
    assert asked.status_code == 200, asked.text
    assert served.script.submissions[-1].media[0].length == 6


def test_every_length_has_as_many_tokens_as_the_encoder_computes_rows(folder: Path) -> None:
    """QwenLM/Qwen2-Audio#103 (68 rows for 69 placeholders), vllm#11512 (some lengths of about two seconds)."""
    processor = read_audio_processor(folder)
    assert processor is not None
    for num_samples in range(321, 2 * RATE, 37):
        layout = processor.sound_layout(num_samples, {})
        frames = -(-num_samples // 160)  # as transformers counts them in its attention mask
        assert len(processor.expand(layout, None).token_ids) == (((frames - 1) // 2 + 1) - 2) // 2 + 1


def b64(file: bytes) -> str:
    return base64.b64encode(file).decode()


async def test_ollama_sends_sound_among_the_images(served: Served) -> None:
    """Ollama tells sound from pictures by its first bytes (ollama#15427); clients rely on it (ahyatt/llm#289)."""
    clip = wav(noise(8_000), RATE)
    expected, features = await submitted(served, messages=user(input_audio(clip), text("what?")))
    chat = [{"role": "user", "content": "what?", "images": [b64(clip)]}]
    found, heard = await submitted(served, "/api/chat", messages=chat, stream=False)
    assert (found, len(heard)) == (expected, 1)
    np.testing.assert_array_equal(heard[0], features[0])
    found, _ = await submitted(served, "/api/generate", prompt="what?", images=[b64(clip)], stream=False)
    assert found == expected
    raw, _ = await submitted(
        served, "/api/generate", prompt=f"hear {PLACEHOLDER}!", images=[b64(clip)], raw=True, stream=False
    )
    assert raw.startswith("hear [")
    for no_sound in (plain((1, 2, 3)), bytes(100)):  # a picture; PCM without a header
        chat = [{"role": "user", "content": "x", "images": [b64(no_sound)]}]
        status, said = await served.refusal("/api/chat", messages=chat)
        assert (status, "images are not supported" in said) == (400, True), said


async def test_sglang_audio_data(served: Served) -> None:
    clip = wav(noise(8_000), RATE)
    given = {"sampling_params": {"max_new_tokens": 1}}
    words = f"a {PLACEHOLDER} b"
    for data in (b64(clip), [f"data:audio/wav;base64,{b64(clip)}"], {"url": f"data:;base64,{b64(clip)}"}):
        found, heard = await submitted(served, "/generate", text=words, audio_data=data, **given)
        assert (found[:3], found[-3:], len(heard)) == ("a [", "] b", 1)
    for field, data, reason in (
        ("audio_data", 3, "audio_data must hold URLs or base64 texts, got int"),
        ("image_data", b64(plain((1, 2, 3))), "not supported"),
    ):
        status, said = await served.refusal("/generate", text=words, **{field: data})
        assert (status, reason in said) == (400, True), said
    status, said = await served.refusal("/generate", text=[words, "b"], audio_data=[b64(clip)])
    assert (status, "audio_data has sound for 1 prompts; there are 2" in said) == (400, True)


@pytest.mark.parametrize(
    ("head", "is_sound"),
    [
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", True),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", False),
        (b"ID3\x04", True),
        (b"fLaC", True),
        (b"OggS", True),
        (b"\xff\xfb\x90\x00", True),
        (b"\xff\xd8\xff\xe0", False),  # JPEG
        (b"\x89PNG\r\n\x1a\n", False),
        (b"\x00\x00\x00\x20ftypM4A \x00", True),
        (b"\x00\x00\x00\x20ftypavif\x00", False),
        (b"\x1aE\xdf\xa3", False),  # Matroska and WebM may have pictures
        (b"", False),
    ],
)
def test_files_of_sound_are_told_by_their_first_bytes(head: bytes, is_sound: bool) -> None:
    assert is_sound_file(head) is is_sound
