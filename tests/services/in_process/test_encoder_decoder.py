"""An engine without services answers about sound as transformers' Whisper does: the decoder attends to blocks that hold
the output of the encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.services.in_process.engine_core import EngineCore
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.shared.columns import i32_bytes
from quire.shared.errors import NotFound
from quire.shared.kv.block_hash import root_hash
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import SchedulerSettings, WorkerSettings
from tests.services.worker.media.sounds import (
    VOCAB_SIZE,
    Features,
    greedy,
    identifier_of,
    item_of,
    logits_of,
    make_whisper,
    spectrogram,
)

NUM_TOKENS = 12


class SoundEngine:
    """Engine with spectrograms, and the answers and ends of its sequences."""

    def __init__(self, folder: Path, sounds: list[Features], *, caching: bool = True, **sizes: Any) -> None:
        self.kept, self.fetched = {identifier_of(one): one for one in sounds}, list[bytes]()
        known: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "threads": 1}
        worker = WorkerSettings(model=str(folder), **{"max_num_batched_tokens": 24, **known, **sizes})
        self.core = EngineCore(worker, SchedulerSettings(enable_prefix_caching=caching), "whisper", 1, self._fetch)
        self.answers: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, Any] = {}

    def _fetch(self, identifier: bytes) -> Any:
        self.fetched.append(identifier)
        if identifier not in self.kept:
            raise NotFound("it is not kept any more")
        return self.kept[identifier]

    def add(self, key: int, tokens: list[int], sound: Features | None, **fields: Any) -> None:
        params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
        item = None if sound is None else item_of(sound)
        known: dict[str, Any] = {
            "media": ()
            if item is None
            else (MediaItem(item.identifier, 0, 1, item.num_embeddings, MediaSource("", item)),),
            "payload": Payload(pb.SequenceParams(sampling=params).SerializeToString()),
            "max_total_tokens": len(tokens) + NUM_TOKENS,
            "asks_logprobs": True,
        }
        column = SequenceTokens(i32_bytes(tokens))
        sequence = Sequence(key, 1, key, column, len(tokens), root_hash=root_hash(), **{**known, **fields})
        self.answers[key], self.logprobs[key] = [], []
        self.core.add(sequence)

    def step(self) -> None:
        events = self.core.step()
        for part in events.tokens:
            for key, token in zip(part.sequence_ids.tolist(), part.token_ids.tolist(), strict=True):
                self.answers[key].append(token)
            if part.logprobs is not None:
                asked = part.logprobs
                for key, value in zip(asked.sequence_ids.tolist(), asked.entries.logprobs.tolist(), strict=True):
                    self.logprobs[key].append(value)
        self.ends |= {end.sequence.sequence_id: end for end in events.finished}
        self.check()

    def run(self) -> None:
        while len(self.ends) < len(self.answers):
            self.step()

    def check(self) -> None:
        """Checks that no block of the pool is lost."""
        core = self.core.core
        use = core.use
        assert use.free + use.cached + use.used == use.total
        assert core.kv.num_unowned() == 0
        core.encoder_outputs.check_invariant()


def prompt_of(length: int, first: int = 3) -> list[int]:
    return [first, *((7 * i + 5) % VOCAB_SIZE for i in range(length - 1))]


def test_answers_of_a_batch_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    sounds = [spectrogram(seed) for seed in (1, 2, 3)]
    engine = SoundEngine(tmp_path, sounds)
    asked = [(prompt_of(length), sounds[number % 3]) for number, length in enumerate((1, 4, 9, 30, 17, 2))]
    for key, (prompt, sound) in enumerate(asked):
        engine.add(key, prompt, sound)
    engine.run()
    for key, (prompt, sound) in enumerate(asked):
        assert engine.answers[key] == greedy(model, sound, prompt, NUM_TOKENS), key
        whole = logits_of(model, sound, [*prompt, *engine.answers[key]]).log_softmax(-1)
        wanted = [float(whole[len(prompt) - 1 + i, token]) for i, token in enumerate(engine.answers[key])]
        np.testing.assert_allclose(engine.logprobs[key], wanted, atol=2e-5)
    assert len(engine.fetched) == 3, "each sound is encoded once"
