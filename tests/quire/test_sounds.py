"""Sound of Python programs reaches the model's processor as the same files would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.async_client import AsyncClient
from quire.params import SamplingParams
from quire.shared.errors import InvalidArgument
from quire.sounds import media_part
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.hearing import PLACEHOLDER, input_audio, write_hearing_folder
from tests.services.frontend.media.seeing import Served, seeing_frontend
from tests.shared.media.audio.files import noise, wav

RATE = 16_000
ONE = SamplingParams(max_tokens=1)


async def sent(served: Served, asking: Any) -> list[bytes]:
    """Returns the features of the clips of the next submission, and lets the call finish."""
    number = len(served.script.submissions)
    served.script.pause()
    task = asyncio.ensure_future(asking)
    submission = await served.submission(number)
    found = [(await fetch_pixels(served.media_address, item.identifier))[1] for item in submission.media]
    served.script.resume()
    await task
    return found


async def test_generate_takes_what_users_of_vllm_have(tmp_path: Path) -> None:
    folder = write_hearing_folder(tmp_path / "model")
    whole = np.round(noise(4_000) * 32767).astype(np.int16)
    samples = (whole / np.float32(32768)).astype(np.float32)
    file = wav(samples * 32768 / 32767, RATE)
    (tmp_path / "clip.wav").write_bytes(file)
    kinds: list[Any] = [
        (samples, RATE),
        samples,
        (samples.astype(np.float64), float(RATE)),
        (whole, RATE),
        (np.stack([samples, samples]), RATE),
        (np.stack([samples, samples], axis=1), RATE),
        tmp_path / "clip.wav",
        str(tmp_path / "clip.wav"),
        file,
        media_part(file).content,
    ]
    async with seeing_frontend(folder) as served, AsyncClient(served.started.frontend.grpc_address) as client:
        features = []
        for clip in kinds:
            prompt = {"prompt": f"hear {PLACEHOLDER} ?", "multi_modal_data": {"audio": clip}}
            features += await sent(served, client.generate(prompt, ONE))
        assert len(features) == len(kinds)
        for found in features[1:]:
            np.testing.assert_allclose(np.frombuffer(found, "<f4"), np.frombuffer(features[0], "<f4"), atol=1e-5)
        several = {"prompt": f"{PLACEHOLDER}{PLACEHOLDER}", "multi_modal_data": {"audio": [(samples, RATE), file]}}
        assert len(await sent(served, client.generate(several, ONE))) == 2
        parts = [input_audio(file), {"type": "audio", "audio": (samples, RATE)}, {"type": "text", "text": "?"}]
        assert len(await sent(served, client.chat([{"role": "user", "content": parts}], ONE))) == 2


@pytest.mark.parametrize(
    ("clip", "reason"),
    [
        (None, "got NoneType"),
        (3, "got int"),
        ((np.zeros(4, np.int64), RATE), r"shape \(4,\) and type int64 at 16000 Hz is not sound"),
        ((np.zeros((2, 2, 2), np.float32), RATE), "is not sound"),
        ((np.zeros(4, np.float32), 0), "at 0 Hz is not sound"),
        ("/no/such/clip.wav", "cannot read '/no/such/clip.wav'"),
    ],
)
def test_what_is_no_sound_is_named(clip: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        media_part(clip)
