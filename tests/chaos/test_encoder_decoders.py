"""Whisper while a worker of two is killed or drained: the other encodes the clips again, and texts do not change."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import transformers

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from tests.chaos.conftest import FRONTEND, SCHEDULER, leaves_nothing_behind
from tests.chaos.kill_helpers import has_work
from tests.chaos.test_workers import pid
from tests.e2e.kv.test_kv_handover import metric_total
from tests.e2e.sound.served import SPECIAL
from tests.services.frontend.tiny_folder import byte_level_tokenizer
from tests.services.worker.media.sounds import greedy, make_whisper
from tests.shared.media.audio.files import noise
from tests.waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

NUM_TOKENS, NUM_CHECKED, NUM_CLIPS, NUM_BINS, RATE = 150, 4, 4, 20, 16_000
WORKER = {"num_blocks": 400, "threads": 1, "dtype": "float32", "block_size": 8, "max_num_seqs": 8}
PROMPT = [3, 5, 7]
WORKERS = ("worker-0", "worker-1")  # one of them has all clips in its cache


class SavedClips(NamedTuple):
    """Checkpoint, clips, and the first tokens that transformers answers with."""

    folder: Path
    clips: list[np.ndarray]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedClips:
    folder = tmp_path_factory.mktemp("models") / "whisper"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    sizes = {"num_mel_bins": NUM_BINS, "max_source_positions": 50, "max_target_positions": 256}
    model = make_whisper(folder, vocab_size=len(tokenizer), **sizes)
    tokenizer.save_pretrained(folder)
    extract = transformers.WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=1)
    extract.save_pretrained(folder)
    clips = [noise(6_000 + 2_000 * number, seed=number) for number in range(NUM_CLIPS)]
    features = [extract(clip, sampling_rate=RATE, return_tensors="np").input_features for clip in clips]
    return SavedClips(folder, clips, [greedy(model, one, PROMPT, NUM_CHECKED) for one in features])


@pytest.fixture
def two_workers(saved: SavedClips) -> Iterator[Cluster]:
    settings = {"worker": WORKER, "scheduler": SCHEDULER, "frontend": FRONTEND}
    options = ClusterOptions(model=str(saved.folder), workers=2, http_port=0, grpc_port=0, settings=settings)
    with Cluster(options) as cluster:
        yield cluster


def tokens_of(cluster: Cluster, clip: np.ndarray) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (clip, RATE)}}
    with Client(cluster.grpc_address) as client:
        (answer,) = client.generate([prompt], params)
    return list(answer.outputs[0].token_ids)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_texts_do_not_change(two_workers: Cluster, saved: SavedClips, sent: signal.Signals) -> None:
    ended = threading.Event()
    undisturbed = [tokens_of(two_workers, clip) for clip in saved.clips]
    assert [tokens[:NUM_CHECKED] for tokens in undisturbed] == saved.expected

    def ask_on(number: int) -> list[list[int]]:
        found = []
        while not ended.is_set():
            found.append(tokens_of(two_workers, saved.clips[number]))
        return [*found, tokens_of(two_workers, saved.clips[number])]

    with ThreadPoolExecutor(NUM_CLIPS) as pool:
        asking = [pool.submit(ask_on, number) for number in range(NUM_CLIPS)]
        try:
            victim = until(lambda: next((name for name in WORKERS if has_work(two_workers, name)), ""))
            os.kill(pid(two_workers, victim), sent)
            if sent is signal.SIGKILL:
                until(lambda: metric_total(two_workers, "quire_scheduler_sequences_moved_total") > 0)
            else:
                until(lambda: not has_work(two_workers, victim))
        finally:
            ended.set()
    for number, one in enumerate(asking):
        assert one.result() == [undisturbed[number]] * len(one.result())
    leaves_nothing_behind(two_workers)
