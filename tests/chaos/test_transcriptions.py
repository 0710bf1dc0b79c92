"""Transcriptions while a worker or the scheduler dies: the text does not change."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import Client
from quire.transcriptions import TranscriptionExtras
from tests.chaos.conftest import FRONTEND, SCHEDULER, leaves_nothing_behind
from tests.chaos.test_workers import pid
from tests.e2e.sound.served import ONCE, RATE, Served, floats, whisper_cluster
from tests.shared.media.audio.files import noise

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PAUSE = np.zeros(RATE // 2, np.float32)
SOUND = floats(np.concatenate([part for seed in range(12) for part in (noise(12_000, seed=seed), PAUSE)]))
GIVEN: TranscriptionExtras = {"language": "en", "temperature": float(ONCE), "max_completion_tokens": 40}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("models") / "whisper"
    with whisper_cluster(folder, 2, scheduler=SCHEDULER, frontend=FRONTEND) as found:
        yield found


@pytest.mark.parametrize("victim", ["worker-0", "worker-1", "scheduler-0"])
def test_texts_do_not_change(served: Served, victim: str) -> None:
    with Client(served.cluster.grpc_address) as client:
        expected = client.transcribe(SOUND, **GIVEN).text
        parts = client.stream_transcription(SOUND, **GIVEN)
        first = next(parts)
        assert first.done is None
        os.kill(pid(served.cluster, victim), signal.SIGKILL)
        *_, last = parts
        assert last.done is not None
        assert last.done.text == expected
    leaves_nothing_behind(served.cluster)
