"""An engine without services aligns text with sound as transformers' Whisper does."""

from __future__ import annotations

import json
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.services.scheduler.core.plan import PooledOutput
from quire.services.scheduler.values.payload import Payload
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.transcription.alignment import first_rows
from tests.services.in_process.test_encoder_decoder import SoundEngine, prompt_of
from tests.services.worker.media.sounds import NUM_ROWS, Features, make_whisper, spectrogram

STEP_S = 0.02


class AligningEngine(SoundEngine):
    """Engine whose sequences are aligned."""

    def align(self, key: int, tokens: list[int], sound: Features, first: int, num_rows: int) -> None:
        params = pb.SequenceParams(alignment=pb.AlignmentParams(first_position=first, num_rows=num_rows))
        self.pool(key, tokens, sound, params)

    def pool(self, key: int, tokens: list[int], sound: Features, params: pb.SequenceParams) -> None:
        payload = Payload(params.SerializeToString())
        given = {"max_total_tokens": len(tokens), "asks_logprobs": False, "skip_reading_prefix_cache": True}
        self.add(key, tokens, sound, payload=payload, samples_nothing=True, **given)

    def results(self) -> dict[int, np.ndarray]:
        """Returns the numbers of all sequences, by key."""
        found: dict[int, np.ndarray] = {}
        while len(self.ends) < len(self.answers):
            events = self.core.step()
            self.ends |= {end.sequence.sequence_id: end for end in events.finished}
            found |= {one.sequence.sequence_id: values(one) for one in events.pooled}
        self.check()
        return found


def values(pooled: PooledOutput) -> np.ndarray:
    return np.frombuffer(pooled.values, dtype="<f4")


@torch.inference_mode()
def expected(model: Any, sound: Features, tokens: list[int], heads: list[list[int]], first: int) -> list[float]:
    """Returns the times of transformers for the tokens from `first` on."""
    given = torch.tensor([tokens])
    out = model(torch.from_numpy(sound), decoder_input_ids=given, output_attentions=True)
    found = {"cross_attentions": (out.cross_attentions,), "sequences": given}

    class Outputs(dict[str, Any]):
        __getattr__ = dict.__getitem__

    extract = methodcaller(
        "_extract_token_timestamps", Outputs(found), heads, STEP_S, num_frames=2 * 17, num_input_ids=first
    )
    times = extract(model)
    return times[0, first:-1].tolist()


@pytest.mark.parametrize("listed", [None, [[0, 1], [2, 0], [2, 3]]])
@pytest.mark.parametrize("budget", [24, 8])  # tokens of a step: whole prompts, and chunks
def test_times_are_those_of_transformers(tmp_path: Path, listed: Any, budget: int) -> None:
    model = make_whisper(tmp_path)
    heads = listed or [[layer, head] for layer in (1, 2) for head in range(4)]
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": listed}))
    sounds = [spectrogram(seed) for seed in (1, 2)]
    engine = AligningEngine(tmp_path, sounds, max_num_batched_tokens=budget)
    asked = [(prompt_of(length), sounds[length % 2], first) for length, first in ((20, 4), (9, 0), (13, 8), (15, 3))]
    for key, (tokens, sound, first) in enumerate(asked):
        engine.align(key, tokens, sound, first, 17)
    found = engine.results()
    for key, (tokens, sound, first) in enumerate(asked):
        alignment = found[key].reshape(len(tokens) - first, 17)
        wanted = expected(model, sound, tokens, heads, first)
        np.testing.assert_allclose(first_rows(alignment) * STEP_S, wanted, atol=1e-6, err_msg=str(key))


def test_alignments_run_beside_samples_and_vectors(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    sound = spectrogram(1)
    alone = AligningEngine(tmp_path, [sound])
    alone.align(0, prompt_of(9), sound, 2, NUM_ROWS)
    wanted = alone.results()[0]
    engine = AligningEngine(tmp_path, [sound], max_num_batched_tokens=64)
    mean = pb.SequenceParams(pooling=pooling_pb2.PoolingParams(pooler=pooling_pb2.POOLER_MEAN))
    engine.pool(0, prompt_of(7), sound, mean)
    engine.add(1, prompt_of(6), sound)
    engine.align(2, prompt_of(9), sound, 2, NUM_ROWS)
    engine.pool(3, prompt_of(8), sound, mean)
    found = engine.results()
    np.testing.assert_allclose(found[2], wanted, atol=1e-4)
    assert found[0].shape == found[3].shape == (32,)
    assert set(found) == {0, 2, 3}


@pytest.mark.parametrize(("first", "num_rows"), [(9, 3), (0, 0)])
def test_empty_ranges_are_refused(tmp_path: Path, first: int, num_rows: int) -> None:
    make_whisper(tmp_path)
    sound = spectrogram(1)
    engine = AligningEngine(tmp_path, [sound])
    engine.align(0, prompt_of(9), sound, first, num_rows)
    engine.results()
    assert "at least one of each must be computed" in str(engine.ends[0].failure)


def test_rows_beyond_the_sound_are_left_out(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    sound = spectrogram(1)
    engine = AligningEngine(tmp_path, [sound])
    engine.align(0, prompt_of(6), sound, 1, 1000)
    assert engine.results()[0].shape == (5 * NUM_ROWS,)
