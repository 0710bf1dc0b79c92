"""An engine without services answers about sound as transformers' Whisper does: the decoder attends to blocks that hold
the output of the encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.services.in_process.engine_core import EngineCore
from quire.services.scheduler.core.sequences.beam_search import BeamRules, BeamSearchState
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.services.worker.models.loading.weights import NewWeights
from quire.shared.columns import i32_bytes
from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.kv.block_hash import root_hash
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import SchedulerSettings, WorkerSettings
from tests.services.worker.media.sounds import (
    NUM_ROWS,
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
        known: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 4,
            "num_blocks": 200,
            "max_num_seqs": 8,
            "threads": 1,
        }
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
        sequence.outputs = [sequence] if sequence.search is not None else []
        self.answers[key], self.logprobs[key] = [], []
        self.core.add(sequence)

    def step(self) -> None:
        events = self.core.step()
        for part in events.tokens:
            keys = part.sequence_ids
            keys = keys if part.token_counts is None else np.repeat(keys, part.token_counts)
            for key, token in zip(keys.tolist(), part.token_ids.tolist(), strict=True):
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


def test_samples_and_beams_share_the_blocks_of_one_sound(tmp_path: Path) -> None:
    model, sound = make_whisper(tmp_path), spectrogram(1)
    engine = SoundEngine(tmp_path, [sound])
    group = SampleGroup()
    for key in range(3):
        engine.add(key, prompt_of(6), sound, sample_group=group)
    while len(engine.core.core.running) < 3:
        engine.step()
    cross = engine.core.core.kv.cross
    assert cross is not None
    tables = {tuple(cross.table(slot)) for slot in range(3)}
    assert len(tables) == 1
    assert len(*tables) == -(-NUM_ROWS // 4)
    engine.run()
    assert [engine.answers[key] for key in range(3)] == [greedy(model, sound, prompt_of(6), NUM_TOKENS)] * 3
    assert engine.core.core.kv.cross.num_references == 0
    assert engine.core.core.use.cached >= len(*tables), "the blocks stay for the next request"


def test_a_beam_search_finds_what_transformers_finds(tmp_path: Path) -> None:
    model, sound = make_whisper(tmp_path), spectrogram(5)
    engine, prompt = SoundEngine(tmp_path, [sound, spectrogram(6)]), prompt_of(5)
    engine.add(7, prompt_of(9), spectrogram(6))
    engine.step()
    rules = BeamRules(3, 1, NUM_TOKENS, frozenset())
    params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    payload = Payload(pb.SequenceParams(sampling=params).SerializeToString(), num_logprobs=rules.num_candidates)
    engine.add(0, prompt, sound, payload=payload, search=BeamSearchState(rules))
    engine.run()
    inputs = {"decoder_input_ids": torch.tensor([prompt]), "num_beams": 3, "do_sample": False, "length_penalty": 1.0}
    ends = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "early_stopping": "never"}
    config = transformers.GenerationConfig(**ends, eos_token_id=None, pad_token_id=0, decoder_start_token_id=3)
    found = transformers.generation.GenerationMixin.generate(
        model, input_features=torch.from_numpy(sound), generation_config=config, **inputs
    )
    assert engine.answers[0] == found[0].tolist()[len(prompt) :]
    assert engine.answers[7] == greedy(model, spectrogram(6), prompt_of(9), NUM_TOKENS)


def test_preempted_sequences_continue_with_the_same_answer(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    sounds = [spectrogram(seed) for seed in range(4)]
    engine = SoundEngine(tmp_path, sounds, num_blocks=26)  # two sounds and little more
    for key, sound in enumerate(sounds):
        engine.add(key, prompt_of(6 + key), sound)
    preempted: set[int] = set()
    while len(engine.ends) < len(sounds):
        engine.step()
        running = engine.core.core.running
        for slot in np.flatnonzero(running.live).tolist():
            key = int(running.keys[slot])
            if len(engine.answers[key]) == 5 + key and key not in preempted:
                engine.core.core.preempt(slot)
                preempted.add(key)
    for key, sound in enumerate(sounds):
        assert engine.answers[key] == greedy(model, sound, prompt_of(6 + key), NUM_TOKENS), key
    assert engine.core.core.counts.preemptions >= len(sounds)


@pytest.mark.parametrize("num_blocks", [200, 14])
def test_a_sound_whose_blocks_were_evicted_is_encoded_again(tmp_path: Path, num_blocks: int) -> None:
    model = make_whisper(tmp_path)
    sounds = [spectrogram(seed) for seed in range(3)]
    engine = SoundEngine(tmp_path, sounds, num_blocks=num_blocks, encoder_cache_size=NUM_ROWS)
    for key in range(6):
        engine.add(key, prompt_of(3 + key // 3), sounds[key % 3])
        engine.run()
        assert engine.answers[key] == greedy(model, sounds[key % 3], prompt_of(3 + key // 3), NUM_TOKENS), key
    assert len(engine.fetched) == (3 if num_blocks == 200 else 6)


def test_blocks_that_are_evicted_while_a_sequence_waits_cost_it_another_encoding(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    sounds = [spectrogram(seed) for seed in range(2)]
    engine = SoundEngine(tmp_path, sounds, num_blocks=14, encoder_cache_size=NUM_ROWS, max_num_seqs=1)
    engine.add(0, prompt_of(3), sounds[0])
    engine.step()
    engine.add(1, prompt_of(4), sounds[1])
    engine.step()
    engine.add(2, prompt_of(5), sounds[0])  # its blocks are still there, and are needed by the one before it
    engine.run()
    assert engine.answers[2] == greedy(model, sounds[0], prompt_of(5), NUM_TOKENS)
    assert engine.fetched == [identifier_of(sounds[number]) for number in (0, 1, 0)]


def test_prefixes_of_the_decoder_are_found_for_the_same_sound_alone(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    sounds, prompt = [spectrogram(1), spectrogram(2)], prompt_of(23)
    engine = SoundEngine(tmp_path, sounds)
    num_cached = []
    for key, sound in enumerate((sounds[0], sounds[1], sounds[0], sounds[1])):
        before = engine.core.core.counts.cached_tokens
        engine.add(key, prompt, sound)
        engine.run()
        num_cached.append(engine.core.core.counts.cached_tokens - before)
        assert engine.answers[key] == greedy(model, sound, prompt, NUM_TOKENS), key
    assert num_cached[:2] == [0, 0]
    assert min(num_cached[2:]) >= 20


def test_without_prefix_caching_sounds_are_still_shared(tmp_path: Path) -> None:
    model, sound = make_whisper(tmp_path), spectrogram(1)
    engine = SoundEngine(tmp_path, [sound], caching=False)
    for key in range(3):
        engine.add(key, prompt_of(20), sound)
    engine.run()
    assert [engine.answers[key] for key in range(3)] == [greedy(model, sound, prompt_of(20), NUM_TOKENS)] * 3
    assert engine.core.core.counts.cached_tokens == 0


def test_other_weights_write_the_blocks_again(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    models = [make_whisper(folder, seed) for folder, seed in zip(folders, (7, 8), strict=True)]
    sound = spectrogram(1)
    engine = SoundEngine(folders[0], [sound])
    engine.add(0, prompt_of(3), sound)
    engine.run()
    engine.core.update_weights(NewWeights(folders[1]))
    engine.add(1, prompt_of(3), sound)
    engine.run()
    for key, model in enumerate(models):
        assert engine.answers[key] == greedy(model, sound, prompt_of(3), NUM_TOKENS), key


@pytest.mark.parametrize(
    ("num_sounds", "text"),
    [(0, "the prompt has 0 items"), (2, "the prompt has 2 items")],
)
def test_a_prompt_needs_exactly_one_sound(tmp_path: Path, num_sounds: int, text: str) -> None:
    make_whisper(tmp_path)
    sound = spectrogram(1)
    engine = SoundEngine(tmp_path, [sound])
    item = item_of(sound)
    media = (MediaItem(item.identifier, 0, 1, NUM_ROWS, MediaSource("", item)),) * num_sounds
    engine.add(0, prompt_of(3), None, media=media)
    engine.add(1, prompt_of(3), sound)
    engine.run()
    assert text in engine.ends[0].failure.message
    assert engine.ends[1].reason is Reason.LENGTH


@pytest.mark.parametrize("shape", [(1, 5, 43), (1, 4, 44), (2, 5, 44)])
def test_features_of_another_size_fail_their_request_alone(tmp_path: Path, shape: tuple[int, ...]) -> None:
    make_whisper(tmp_path)
    wrong, sound = np.zeros(shape, np.float32), spectrogram(1)
    engine = SoundEngine(tmp_path, [sound])
    item = item_of(wrong)
    engine.kept[item.identifier] = wrong
    media = (MediaItem(item.identifier, 0, 1, NUM_ROWS, MediaSource("", item)),)
    engine.add(0, prompt_of(3), None, media=media)
    engine.add(1, prompt_of(3), sound)
    engine.run()
    assert f"media: features {list(shape)}, and the encoder needs [1, 5, 44]" in engine.ends[0].failure.message
    assert engine.ends[1].reason is Reason.LENGTH


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"decoder_layers": 0}, "num_hidden_layers is 0: must be from 1 to 4096"),
        ({"max_source_positions": 1 << 20}, "max_source_positions is 1048576: must be from 1 to 65536"),
        ({"decoder_attention_heads": 5}, "32"),
        ({"encoder_attention_heads": 5}, "audio_config has 5 heads, which do not divide 32"),
        ({"activation_function": "tanh"}, "hidden_act is 'tanh'"),
    ],
)
def test_configurations_that_cannot_run_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    make_whisper(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InvalidArgument, match=text):
        SoundEngine(tmp_path, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("language_model_only", True), ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}')],
)
def test_settings_that_are_not_supported_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    make_whisper(tmp_path)
    with pytest.raises(InvalidArgument, match=f"{name}: not supported for encoder-decoder models"):
        SoundEngine(tmp_path, [], **{name: value})


def test_a_cache_that_holds_no_sound_is_refused(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    with pytest.raises(InvalidArgument, match="encoder_cache_size: 21 rows, and an item of this model has 22"):
        SoundEngine(tmp_path, [], encoder_cache_size=21)


def test_tokens_that_the_author_suppresses_are_never_chosen(tmp_path: Path) -> None:
    model, sound, prompt = make_whisper(tmp_path), spectrogram(3), prompt_of(6)
    free = greedy(model, sound, prompt, NUM_TOKENS)
    banned = free[2:3]
    first = greedy(model, sound, prompt, 1, banned)
    lists = {"suppress_tokens": banned, "begin_suppress_tokens": first}
    (tmp_path / "generation_config.json").write_text(json.dumps(lists))
    wanted = greedy(model, sound, prompt, NUM_TOKENS, banned, first)
    assert wanted[0] not in (free[0], first[0])
    engine = SoundEngine(tmp_path, [sound])
    for key in (0, 1):
        engine.add(key, prompt, sound)
    engine.run()
    assert [engine.answers[0], engine.answers[1]] == [wanted, wanted]


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens"])
@pytest.mark.parametrize("value", ["7", {"a": 1}, ["x"], [True], 5])
def test_lists_of_suppressed_tokens_are_checked(tmp_path: Path, name: str, value: Any) -> None:
    make_whisper(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(InvalidArgument, match=f"generation_config.json: {name} must be a list of token ids"):
        SoundEngine(tmp_path, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_embedding": True},
        {"decoder_layers": 1, "encoder_layers": 4},
        {"activation_function": "relu"},
        {"encoder_attention_heads": 2, "decoder_attention_heads": 8},
    ],
)
def test_variants_of_the_configuration(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, sound = make_whisper(tmp_path, **changes), spectrogram(3)
    engine = SoundEngine(tmp_path, [sound])
    engine.add(0, prompt_of(7), sound)
    engine.run()
    assert engine.answers[0] == greedy(model, sound, prompt_of(7), NUM_TOKENS)


def test_published_names_without_the_outer_module_load(tmp_path: Path) -> None:
    model, sound = make_whisper(tmp_path), spectrogram(3)
    path = tmp_path / "model.safetensors"
    named = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(named, path)
    engine = SoundEngine(tmp_path, [sound])
    engine.add(0, prompt_of(7), sound)
    engine.run()
    assert engine.answers[0] == greedy(model, sound, prompt_of(7), NUM_TOKENS)
