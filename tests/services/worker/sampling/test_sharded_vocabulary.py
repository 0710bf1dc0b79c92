"""Samplers with a shard of the vocabulary each return the same as one with the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.services.worker.layers.sharding import WHOLE, Shard
from quire.services.worker.sampling.accept import REJECTION_METHODS
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.sampler import SampledTokens, Sampler
from quire.services.worker.sampling.vocabulary.open_vocabulary import open_vocabulary
from quire.services.worker.sampling.vocabulary.sharded_vocabulary import ShardedVocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.drafts.drafts import DraftRows, Drafts
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.plugins.example.quire_example.logits_processors import Multiples
from tests.services.worker.sampling.rank_threads import RankThreads

CPU = torch.device("cpu")
PROMPT, OUTPUT = [4, 5, 1], [3, 3, 9]
REST = {"prompt", "output", "eos", "bad_words", "marks"}
SEEDED = {"temperature": 0.9, "seed": 7}

# One slot per entry.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "temperature": {"temperature": 1.3, "seed": -5, "logprobs": 0},
    "top_k": {**SEEDED, "top_k": 5},
    "top_k of one": {**SEEDED, "top_k": 1},
    "top_p": {**SEEDED, "top_p": 0.8, "logprobs": 2},
    "hardly any top_p": {**SEEDED, "top_p": 1e-6},
    "min_p": {**SEEDED, "min_p": 0.2},
    "filters": {"temperature": 1.7, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "logprobs": 5},
    "top_n_sigma": {**SEEDED, "top_n_sigma": 1.0, "logprobs": 1},
    "penalties": {**SEEDED, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.4},
    "bias": {"logit_bias": {3: 2.0, 11: -4.0, 0: 1.5}, "logprobs": 2},
    "allowed": {**SEEDED, "allowed_token_ids": [2, 6, 10]},
    "one allowed": {"allowed_token_ids": [10], "logprobs": 2},
    "bad_words": {"bad_words": [[1], [9, 3], [0], [11]]},
    "min_tokens": {**SEEDED, "min_tokens": 6, "eos": [1, 10], "stop_token_ids": [9]},
    "thinking": {
        "thinking_token_budget": 2,
        "output": [8, 2],
        "marks": {"think_start_token_ids": [8], "think_end_token_ids": [10, 0]},
    },
    "named": {"logprob_token_ids": [6, 0, 12, 6, 11]},
    "processor": {**SEEDED, "logits_processors": {"multiples": '{"of": 3}'}, "logprobs": 1},
    "nothing is left": {"allowed_token_ids": [5], "bad_words": [[5]], "logprobs": 1},
    "beam": {"beam_search": {"width": 2}, "logprobs": 4, "min_tokens": 6, "eos": [1]},
}


def admission(fields: dict[str, Any]) -> SlotAdmission:
    output = fields.get("output", OUTPUT)
    params = {"temperature": 0.0, **{name: value for name, value in fields.items() if name not in REST}}
    if "beam_search" in params:
        params["beam_search"] = sampling_pb2.BeamSearch(**params["beam_search"])
    return SlotAdmission(
        token_ids=columns.i32_bytes(PROMPT + output),
        num_prompt_tokens=len(PROMPT),
        sampling=sampling_pb2.SamplingParams(**params),
        eos_token_ids=columns.u32_bytes(fields.get("eos", [])),
        bad_word_token_ids=[columns.i32_bytes(word) for word in fields.get("bad_words", [])],
        **{name: columns.i32_bytes(ids) for name, ids in fields.get("marks", {}).items()},
    )


@dataclass
class Row:
    token: int
    ids: list[int]
    logprobs: list[float]
    rank: int

    @property
    def known(self) -> list[int]:
        """Token ids without banned tokens, whose order is arbitrary."""
        return [token for token, value in zip(self.ids, self.logprobs[1:], strict=True) if value > float("-inf")]


def rows_of(sampled: SampledTokens) -> tuple[list[int], list[Row]]:
    """Returns all tokens, and the rows that have log-probabilities."""
    tokens: list[int] = sampled.token_ids.tolist()
    found = sampled.logprobs
    if found is None:
        return tokens, []
    parts = found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist()
    rows = zip(found.num_wanted.tolist(), *parts, strict=True)
    return tokens, [Row(ids[0], ids[1 : n + 1], values[: n + 1], rank) for n, ids, values, rank in rows if ids[0] >= 0]


def sampler_of(
    shard: Shard,
    asked: list[dict[str, Any]],
    vocab_size: int,
    mode: str = "raw_logprobs",
    *,
    batch_invariant: bool = False,
) -> Sampler:
    """Returns a sampler with one slot per request."""
    ops = kernels.load("cpu", ("quire.kernels.reference",))
    sampler = Sampler(
        len(asked),
        vocab_size,
        -1,
        ops,
        CPU,
        logprobs_mode=mode,
        batch_invariant=batch_invariant,
        processors={"multiples": Multiples},
        vocabulary=open_vocabulary(shard, vocab_size, ops),
    )
    for slot, fields in enumerate(asked):
        sampler.admit(slot, admission(fields))
    return sampler


def samples(
    shard: Shard, asked: list[dict[str, Any]], steps: list[torch.Tensor], mode: str = "raw_logprobs"
) -> list[tuple[list[int], list[Row]]]:
    """Samples all slots for each of the `steps`' logits."""
    sampler = sampler_of(shard, asked, steps[0].size(1), mode)
    lengths = np.array([len(PROMPT + fields.get("output", OUTPUT)) for fields in asked], dtype=np.int32)
    said = []
    for logits in steps:
        positions = Positions(lengths, torch.from_numpy(lengths))
        rows = sampler.vocabulary.local_logits(logits).clone()
        said.append(rows_of(sampler.sample(rows, np.arange(len(asked)), positions)))
        lengths = lengths + 1
    return said


def logits_of(num_steps: int, num_rows: int, vocab_size: int, spread: float = 3.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    return [spread * torch.randn(num_rows, vocab_size, generator=generator) for _ in range(num_steps)]


def assert_same(found: Any, want: Any) -> None:
    assert len(found) == len(want)
    for (tokens, rows), (want_tokens, want_rows) in zip(found, want, strict=True):
        assert tokens == want_tokens
        assert [(row.token, row.known, row.rank) for row in rows] == [
            (row.token, row.known, row.rank) for row in want_rows
        ]
        for row, want_row in zip(rows, want_rows, strict=True):
            assert row.logprobs == pytest.approx(want_row.logprobs, abs=1e-5)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 14), (2, 13), (3, 20), (4, 13), (8, 1001)])
def test_shards_sample_like_the_whole_vocabulary(size: int, vocab_size: int, mode: str) -> None:
    """Combines all parameters in one batch, with vocabularies that divide evenly among ranks and others."""
    asked = list(ASKED.values())
    steps = logits_of(12, len(asked), vocab_size)
    want = samples(WHOLE, asked, steps, mode)
    for found in RankThreads(size).run(lambda shard: samples(shard, asked, steps, mode)):
        assert_same(found, want)


@pytest.mark.parametrize("name", ASKED)
def test_each_parameter_alone(name: str) -> None:
    steps = logits_of(4, 1, 13)
    want = samples(WHOLE, [ASKED[name]], steps)
    for found in RankThreads(2).run(lambda shard: samples(shard, [ASKED[name]], steps)):
        assert_same(found, want)


def test_a_rank_without_any_token() -> None:
    """The last of four ranks has none of five tokens."""
    asked = [{"logprobs": 4}, {**SEEDED, "top_p": 0.9, "logprobs": -1}, {**SEEDED, "frequency_penalty": 1.0}]
    asked = [{**fields, "output": [3]} for fields in asked]
    steps = logits_of(6, len(asked), 5)
    want = samples(WHOLE, asked, steps)
    for found in RankThreads(4).run(lambda shard: samples(shard, asked, steps)):
        assert_same(found, want)


FEW = [{}, {**SEEDED, "top_k": 3}, {**SEEDED, "top_k": 4, "top_p": 0.7}, {**SEEDED, "min_p": 0.1}, SEEDED]


def test_batch_invariant_rows_exchange_the_same_in_any_batch() -> None:
    """With batch_invariant all rows take the same path: a row's traffic does not depend on the other rows."""
    crossed = []
    for others in ([], [{**SEEDED, "top_p": 0.5}]):
        threads, asked = RankThreads(2), [{**SEEDED, "top_k": 4, "top_p": 0.7}, *others]

        def work(shard: Shard, asked: list[dict[str, Any]] = asked) -> list[int]:
            sampler = sampler_of(shard, asked, 400, batch_invariant=True)
            positions = np.full(len(asked), 6, dtype=np.int32)
            rows = sampler.vocabulary.local_logits(logits_of(1, 2, 400)[0][: len(asked)]).clone()
            at = Positions(positions, torch.from_numpy(positions))
            token_ids: list[int] = sampler.sample(rows, np.arange(len(asked)), at).token_ids.tolist()
            return token_ids[:1]

        crossed.append((threads.run(work), [x[:1].tolist() for x in threads.sent]))
    assert crossed[0] == crossed[1]


@pytest.mark.parametrize("more", [[], [{**SEEDED, "top_p": 0.5}]], ids=["few are kept", "many may be kept"])
def test_ties_take_the_lowest_id_and_filters_keep_all_equal_values(more: list[dict[str, Any]]) -> None:
    """Uses logits that are equal on several ranks, as 16-bit logits often are."""
    asked = [*FEW, *more]
    steps = [logits.round() for logits in logits_of(60, len(asked), 40, 1.0)]
    want = samples(WHOLE, asked, steps)
    for found in RankThreads(3).run(lambda shard: samples(shard, asked, steps)):
        assert_same(found, want)


def test_a_forced_token_that_the_model_bans() -> None:
    """No token is less likely than a banned one, and padding is never sampled."""
    asked = [{**ASKED["thinking"], "thinking_token_budget": 0, "logprobs": 1}]
    steps = logits_of(2, 1, 13)
    for logits in steps:
        logits[:, [0, 10]] = float("-inf")
    want = samples(WHOLE, asked, steps)
    assert want[0][0] == [10]
    assert want[0][1][0].rank == 13
    for found in RankThreads(2).run(lambda shard: samples(shard, asked, steps)):
        assert_same(found, want)


@pytest.mark.parametrize("place", [0, 12])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_failed_row_fails_on_all_ranks_and_alone(bad: float, place: int) -> None:
    asked = [{**SEEDED, "top_p": 0.9, "logprobs": 1}] * 3
    steps = logits_of(2, 3, 13)
    steps[0][1, place] = bad
    want = samples(WHOLE, asked, steps)
    assert want[0][0][1] == -1
    for found in RankThreads(2).run(lambda shard: samples(shard, asked, steps)):
        assert_same(found, want)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 3),
        ({"temperature": 1.0}, 3),
        ({"temperature": 1.0, "min_p": 0.1}, 4),
        ({"temperature": 1.0, "top_k": 20}, 4 + 20),
        ({"temperature": 1.0, "top_k": 20, "top_p": 0.9}, 5 + 20),
        ({"temperature": 1.0, "top_k": 300}, 4 + 4 * 256),
        ({"temperature": 1.0, "top_p": 0.9}, 4 + 4 * 256),
        ({"temperature": 1.0, "top_k": 300, "top_p": 0.9, "min_p": 0.01}, 4 + 8 * 256),
        ({"logprobs": 5}, 3 + 1 + 2 * 5 + 6 + 1),
        ({"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4]}, 3),
        ({"top_n_sigma": 1.0}, 3 + 4),
    ],
)
def test_rank_traffic_does_not_grow_with_the_vocabulary(fields: dict[str, Any], most: int) -> None:
    """Counts the elements that a rank sends per step and row."""
    for vocab_size in (400, 4_000, 40_000):
        threads = RankThreads(2)
        threads.run(lambda shard, size=vocab_size: samples(shard, [fields] * 6, logits_of(1, 6, size)))
        assert 0 < threads.num_sent <= 6 * most


def chosen_for_drafts(
    shard: Shard,
    method: str,
    asked: list[dict[str, Any]],
    logits: torch.Tensor,
    proposed: torch.Tensor | None = None,
) -> list[list[int]]:
    """Returns the tokens of three rows per slot, for two drafts each. `proposed`: the drafts' distributions."""
    sampler, slots = sampler_of(shard, asked, logits.size(1)), np.arange(len(asked))
    counts = np.full(len(asked), 2, dtype=np.int32)
    token_ids = np.arange(2 * len(asked), dtype=np.int32) * 5 % logits.size(1)
    drafts = DraftRows.of(slots, counts, Drafts(slots, counts, token_ids, proposed))
    places = np.tile(np.arange(6, 9, dtype=np.int32), len(asked))
    positions = Positions(places, torch.from_numpy(places), torch.from_numpy(drafts.preceding_drafts))
    ready = sampler.process(sampler.vocabulary.local_logits(logits).clone(), np.repeat(slots, 3), positions)
    chosen: list[int] = REJECTION_METHODS[method](ready, drafts).tolist()
    said = rows_of(ready.record_choice(torch.tensor(chosen, dtype=torch.int32)))
    return [chosen, *(row.ids for row in said[1])]


@pytest.mark.parametrize("are_drawn", [False, True])
@pytest.mark.parametrize("method", REJECTION_METHODS)
def test_drafts_are_verified_like_with_the_whole_vocabulary(method: str, are_drawn: bool) -> None:
    asked = [fields for name, fields in ASKED.items() if name not in {"beam", "nothing is left"}] * 4
    logits, others = logits_of(2, 3 * len(asked), 13)
    proposed = logits[: 2 * len(asked)] + 0.3 * others[: 2 * len(asked)] if are_drawn else None
    want = chosen_for_drafts(WHOLE, method, asked, logits, proposed)
    for found in RankThreads(2).run(lambda shard: chosen_for_drafts(shard, method, asked, logits, proposed)):
        assert found == want


@pytest.mark.parametrize("method", REJECTION_METHODS)
def test_verifying_drafts_gathers_no_logits(method: str) -> None:
    threads = RankThreads(2)
    (logits,) = logits_of(1, 3 * 4, 4_000)
    threads.run(lambda shard: chosen_for_drafts(shard, method, [SEEDED] * 4, logits, logits[:8] / 2))
    assert threads.sent
    assert threads.num_sent <= 12 * 12


def test_only_rows_with_a_logits_processor_are_gathered() -> None:
    threads, asked = RankThreads(2), [{}, ASKED["processor"], {}, {}]
    threads.run(lambda shard: samples(shard, asked, logits_of(1, 4, 4_000)))
    assert [tuple(x.shape) for x in threads.sent if x.size(-1) >= 2_000] == [(1, 2_000)]


def test_a_single_rank_uses_the_kernels_directly() -> None:
    assert not isinstance(open_vocabulary(WHOLE, 12, kernels.load("cpu")), ShardedVocabulary)
