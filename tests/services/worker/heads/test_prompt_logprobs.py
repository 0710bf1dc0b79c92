"""Prompt log-probabilities equal those of transformers, however the prompt is split into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
MAX_ERROR = 5e-5


def asking(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**{"temperature": 0.0, **fields})


def found(rig: Rig) -> list[tuple[list[int], list[float], int]]:
    """Returns tokens, log-probabilities and rank of each position in the last result."""
    prompts = rig.last_result.prompt_logprobs
    wire = prompts.entries
    assert sum(columns.u32(prompts.position_counts)) == len(columns.u32(wire.ranks))
    ids, values = columns.i32(wire.token_ids).tolist(), columns.f32(wire.logprobs).tolist()
    positions, at = [], 0
    for count, rank in zip(columns.u32(wire.entry_counts).tolist(), columns.u32(wire.ranks).tolist(), strict=True):
        positions.append((ids[at : at + count], values[at : at + count], rank))
        at += count
    assert at == len(ids)
    return positions


def check(positions: list[Any], made: Checkpoint, tokens: list[int], first: int, count: int) -> None:
    expected = made.logits(tokens).log_softmax(1)
    for offset, (ids, values, rank) in enumerate(positions):
        row, token = expected[first + offset - 1], tokens[first + offset]
        assert ids[0] == token
        assert set(ids[1:]) == set(row.topk(count).indices.tolist())
        assert np.abs(np.array(values) - row[ids].numpy()).max() < MAX_ERROR
        assert rank == int((row >= row[token]).sum())


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("chunks", [[23], [1, 1, 9, 12], [22, 1]])
def test_every_position_comes_once(checkpoint: Make, chunks: list[int], backend: str) -> None:
    """Runs kernel by kernel and, with the compiled kernels, as a tape."""
    made, tokens = checkpoint("qwen3-tied"), prompt(23)
    rig = Rig(made.folder, attention_backend=backend)
    other = New(1, prompt(9, seed=5))
    positions = []
    for i, count in enumerate(chunks):
        new = [New(0, tokens, sampling=asking(prompt_logprobs=3)), other] if i == 0 else []
        rig.step(new, {0: count, 1: 9} if i == 0 else {0: count})
        positions += found(rig)
    assert len(positions) == 22
    check(positions, made, tokens, 1, 3)
    rig.step()
    assert not rig.last_result.HasField("prompt_logprobs")


def test_sampling_is_unaffected(checkpoint: Make) -> None:
    tokens = [prompt(11, seed=s) for s in (1, 2)]
    asked, plain = (Rig(checkpoint("qwen3-tied").folder) for _ in range(2))
    samplings = asking(prompt_logprobs=2, logprobs=1), asking(logprobs=1)
    for rig, sampling in zip((asked, plain), samplings, strict=True):
        rig.step([New(0, tokens[0], sampling=sampling), New(2, tokens[1], sampling=asking())], {0: 11, 2: 11})
        first = rig.last_result
        for _ in range(3):
            rig.step()
        assert len(columns.i32(first.logprobs.token_ids)) == 2
    assert [asked.tokens(slot) for slot in (0, 2)] == [plain.tokens(slot) for slot in (0, 2)]


def test_prompts_in_one_step_with_different_parameters(checkpoint: Make) -> None:
    made, tokens = checkpoint("llama"), [prompt(12, seed=s) for s in range(3)]
    rig = Rig(made.folder)
    rig.step(
        [
            New(0, tokens[0], sampling=asking(prompt_logprobs=0)),
            New(1, tokens[1], sampling=asking(prompt_logprobs=5, prompt_logprob_start=7)),
            New(2, [*tokens[2], 3, 4], num_prompt=12, sampling=asking(prompt_logprobs=1)),
        ],
        {0: 12, 1: 12, 2: 14},
    )
    positions = found(rig)
    columns_of = rig.last_result.prompt_logprobs
    assert columns.u32(columns_of.slots).tolist() == [0, 1, 2]
    assert columns.u32(columns_of.position_counts).tolist() == [11, 5, 11]
    check(positions[:11], made, tokens[0], 1, 0)
    check(positions[11:16], made, tokens[1], 7, 5)
    check(positions[16:], made, tokens[2], 1, 1)
    assert len(positions) == 11 + 5 + 11


def test_named_tokens_of_each_position(checkpoint: Make) -> None:
    made, tokens = checkpoint("qwen3-tied"), prompt(8)
    names = [[], [5], [6, 7, 6], [], [9]]
    named = [sampling_pb2.NamedTokens(ids=ids) for ids in names]
    rig = Rig(made.folder)
    rig.step(
        [
            New(0, tokens, sampling=asking(prompt_logprob_token_ids=named)),
            New(1, tokens, sampling=asking(prompt_logprob_token_ids=named[1:], prompt_logprob_start=3)),
            New(2, tokens, sampling=asking(prompt_logprobs=2)),
        ],
        {0: 3, 1: 8, 2: 8},
    )
    positions = found(rig)
    rig.step(counts={0: 5})
    positions[3:3] = found(rig)
    own = made.logits(tokens).log_softmax(1)
    wanted = [names[p] if p < 5 else [] for p in range(1, 8)] + [names[p - 2] if p - 2 < 5 else [] for p in range(3, 8)]
    places = [*range(1, 8), *range(3, 8)]
    for (ids, values, _), names_there, place in zip(positions, wanted, places, strict=False):
        assert ids == [tokens[place], *names_there]
        assert np.abs(np.array(values) - own[place - 1][ids].numpy()).max() < MAX_ERROR
    check(positions[12:], made, tokens, 1, 2)
    assert len(positions) == 7 + 5 + 7


def test_cached_positions_before_the_start_are_not_computed(checkpoint: Make) -> None:
    made, tokens = checkpoint("qwen3-tied"), prompt(15)
    rig = Rig(made.folder)
    rig.step([New(0, tokens)], {0: 15})
    cached = rig.blocks(0)[:2]
    sampling = asking(prompt_logprobs=2, prompt_logprob_start=9)
    rig.step([New(1, tokens, cached_blocks=cached, sampling=sampling)], {1: 7})
    assert len(found(rig)) == 6
    check(found(rig), made, tokens, 9, 2)


def test_logits_in_place_of_probabilities(checkpoint: Make) -> None:
    made, tokens = checkpoint("qwen3-tied"), prompt(6)
    rig = Rig(made.folder, logprobs_mode="processed_logits")
    rig.step([New(0, tokens, sampling=asking(prompt_logprobs=0))], {0: 6})
    values = torch.tensor([values[0] for _, values, _ in found(rig)])
    assert (values - made.logits(tokens)[torch.arange(5), tokens[1:]]).abs().max() < MAX_ERROR


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprob_token_ids": [{"ids": [1]}, {"ids": [VOCAB_SIZE]}]}, "prompt_logprob_token_ids"),
    ],
)
def test_unsupported_requests_are_refused(checkpoint: Make, fields: dict[str, Any], field: str) -> None:
    rig = Rig(checkpoint("qwen3-tied").folder)
    rig.step([New(0, prompt(6), sampling=asking(**fields))], {0: 6})
    (failure,) = rig.last_result.failures
    assert failure.error.message.startswith(field)
