"""Two ranks with half of the vocabulary each sample as one does, without gathering logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tokenizers import Tokenizer

from quire.services.worker.ranks.collectives.group_collectives import GroupCollectives
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.observing import calls_of
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import PERSON, TINY, admit, prepare, run

Make = Callable[[str], Checkpoint]

SAMPLINGS = [
    sampling_pb2.SamplingParams(temperature=0.7, seed=1, top_p=0.9, logprobs=4),
    sampling_pb2.SamplingParams(temperature=1.5, seed=2, top_k=12),
    sampling_pb2.SamplingParams(temperature=1.2, seed=3, min_p=0.05, repetition_penalty=1.3, logprobs=0),
    sampling_pb2.SamplingParams(temperature=1.0, seed=4, top_n_sigma=1.0, presence_penalty=0.4),
    sampling_pb2.SamplingParams(temperature=0.0, frequency_penalty=0.8, logit_bias={3: 1.0, 200: 4.0}, logprobs=20),
    sampling_pb2.SamplingParams(temperature=0.9, seed=6, allowed_token_ids=list(range(90, 130))),
    sampling_pb2.SamplingParams(temperature=0.9, seed=7, logprob_token_ids=[0, 105, 106, 210]),
    sampling_pb2.SamplingParams(temperature=0.0),
]


@contextmanager
def gathered() -> Iterator[list[torch.Tensor]]:
    """Shapes of what rank 0 gathers."""
    found: list[torch.Tensor] = []
    with calls_of(GroupCollectives.all_gather, on_call=lambda call: found.append(call.arguments["x"])):
        yield found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ranks_sample_and_report_as_one(checkpoint: Make, family: str) -> None:
    """With a separate output head, and with a tied embedding and capped logits."""
    folder = checkpoint(family).folder
    whole = Rig(folder, record_logits=False)
    with ranked(folder, record_logits=False) as rig, gathered() as sent:
        new = [New(slot, prompt(5, slot), sampling=sampling) for slot, sampling in enumerate(SAMPLINGS)]
        for each in (whole, rig):
            each.step(new, dict.fromkeys(range(len(SAMPLINGS)), 5))
        for _ in range(12):
            found, want = (each.last_result.logprobs for each in (rig, whole))
            assert (found.entry_counts, found.token_ids) == (want.entry_counts, want.token_ids)
            assert found.ranks == want.ranks
            assert columns.f32(found.logprobs).tolist() == pytest.approx(columns.f32(want.logprobs).tolist(), abs=1e-4)
            for each in (whole, rig):
                each.step()
        assert [rig.tokens(slot) for slot in range(8)] == [whole.tokens(slot) for slot in range(8)]
        assert sent
        assert not [x for x in sent if x.size(-1) >= VOCAB_SIZE // 2]


def test_prompt_logprobs_without_gathering_logits(checkpoint: Make) -> None:
    folder = checkpoint("llama").folder
    asked = sampling_pb2.SamplingParams(temperature=0.0, prompt_logprobs=5)
    whole = Rig(folder, record_logits=False)
    with ranked(folder, record_logits=False) as rig, gathered() as sent:
        for each in (whole, rig):
            each.step([New(0, prompt(20), sampling=asked)], {0: 20})
        found, want = (each.last_result.prompt_logprobs.entries for each in (rig, whole))
        assert (found.token_ids, found.ranks) == (want.token_ids, want.ranks)
        assert columns.f32(found.logprobs).tolist() == pytest.approx(columns.f32(want.logprobs).tolist(), abs=1e-4)
        assert sent
        assert not [x for x in sent if x.size(-1) >= VOCAB_SIZE // 2]


def test_grammar_masks_each_ranks_part(tokenizer: Tokenizer) -> None:
    schema = sampling_pb2.StructuredOutput(json_schema=json.dumps(PERSON))
    whole = Rig(TINY, record_logits=False)
    with ranked(TINY, record_logits=False) as rig:
        rig.group.prepare_grammar(
            pb.PrepareGrammar(
                grammar_id=prepare(whole, json_schema=schema.json_schema), grammar=schema.SerializeToString()
            )
        )
        said = []
        for each in (whole, rig):
            name = prepare(each, json_schema=schema.json_schema)
            tight = sampling_pb2.SamplingParams(temperature=1.0, seed=3, top_p=0.9, min_tokens=4)
            new = [admit(tokenizer, 0, name), admit(tokenizer, 1, name, sampling=tight)]
            said.append(run(each, new, steps=60))
        assert said[0] == said[1]
        assert all(json.loads(tokenizer.decode(tokens[:-1])).keys() == {"name", "age"} for tokens in said[1].values())
