"""Slots with several rows: after each draft the features see the same state as one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels import cpu
from quire.kernels.reference.sampling.sampling import filtered
from quire.services.worker.sampling.accept import choose_by_rejection
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.step.drafts.drafts import DraftRows, Drafts
from tests.services.worker.sampling.test_sampler import LOGITS, VOCAB_SIZE, Bench

PROMPT = [4, 5, 1]
DRAFTS = {0: [3, 1, 1], 2: [9], 3: []}  # by slot
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.4},
    "bad_words": {"bad_words": [[3, 1, 5], [1, 1, 9], [9, 3], [7]]},
    "min_tokens": {"min_tokens": 3, "eos": [1], "stop_token_ids": [9]},
    "ids": {"logit_bias": {3: 1.5}, "allowed_token_ids": [1, 3, 5, 9, 11]},
    "thinking": {
        "thinking_token_budget": 2,
        "marks": {"think_start_token_ids": [3], "think_end_token_ids": [1, 9]},
    },
    "all": {
        "presence_penalty": 0.7,
        "bad_words": [[3, 1, 5]],
        "min_tokens": 2,
        "eos": [5],
        "logit_bias": {3: 1.5},
        "allowed_token_ids": [1, 3, 5, 9, 11],
    },
}


def started(features: dict[str, Any]) -> Bench:
    bench = Bench()
    for slot in DRAFTS:
        bench.admit(slot, prompt=PROMPT, output=[1, 3], **features)
    return bench


def one_at_a_time(bench: Bench, slot: int, tokens: list[int]) -> list[torch.Tensor]:
    """Returns the logits before each of `tokens`, and after the last one."""
    seen = []
    for token in [*tokens, -1]:
        position = np.array([bench.lengths[slot]], dtype=np.int32)
        ready = bench.sampler.process(
            LOGITS.clone().unsqueeze(0), np.array([slot]), Positions(position, torch.from_numpy(position))
        )
        seen.append(ready.logits[0].clone())
        ready.record_choice(torch.tensor([token], dtype=torch.int32))
        bench.lengths[slot] += token >= 0
    return seen


def with_drafts(bench: Bench, accepted: dict[int, int]) -> dict[int, list[torch.Tensor]]:
    """Returns the same logits computed in one step; then accepts the given number of drafts of each slot."""
    slots = np.array([slot for slot, drafts in DRAFTS.items() for _ in range(len(drafts) + 1)])
    preceding = [drafts[:count] for drafts in DRAFTS.values() for count in range(len(drafts) + 1)]
    ahead = torch.tensor([tokens + [-1] * (3 - len(tokens)) for tokens in preceding], dtype=torch.int32)
    starts = np.array([bench.lengths[slot] for slot in slots.tolist()], dtype=np.int32)
    positions = starts + np.array([len(tokens) for tokens in preceding], dtype=np.int32)
    rows = LOGITS.expand(len(slots), VOCAB_SIZE).clone()
    ready = bench.sampler.process(rows, slots, Positions(starts, torch.from_numpy(positions), ahead))
    seen: dict[int, list[torch.Tensor]] = {slot: [] for slot in DRAFTS}
    for slot, row in zip(slots.tolist(), ready.logits, strict=True):
        seen[slot].append(row.clone())
    taken = [drafts[i] if i < accepted[slot] else -1 for slot, drafts in DRAFTS.items() for i in range(len(drafts) + 1)]
    ready.record_choice(torch.tensor(taken, dtype=torch.int32))
    for slot, count in accepted.items():
        bench.lengths[slot] += count
    return seen


@pytest.mark.parametrize("accepted", [{0: 3, 2: 1, 3: 0}, {0: 1, 2: 0, 3: 0}, {0: 2, 2: 1, 3: 0}])
@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
def test_rows_after_drafts_equal_those_of_single_tokens(features: dict[str, Any], accepted: dict[int, int]) -> None:
    single, drafting = started(features), started(features)
    seen = with_drafts(drafting, accepted)
    for slot, drafts in DRAFTS.items():
        for row, expected in zip(seen[slot], one_at_a_time(started(features), slot, drafts), strict=True):
            assert torch.equal(row, expected)
        one_at_a_time(single, slot, drafts[: accepted[slot]])
    assert torch.equal(single.logits(), drafting.logits()), "refused drafts must leave no state"


@pytest.mark.parametrize("package", ["quire.kernels.cpu", "quire.kernels.reference"])
@pytest.mark.parametrize("sampling", [{"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {}], ids=str)
def test_the_rejection_rule_reads_logits_before_they_are_overwritten(sampling: dict[str, Any], package: str) -> None:
    """Temperature and filters apply once: tokens follow the slots' distribution."""
    if package == "quire.kernels.cpu" and cpu.unavailable():
        pytest.skip(cpu.unavailable() or "")
    temperature, count = 0.6, 4000
    bench = Bench(num_slots=count, packages=tuple(dict.fromkeys((package, "quire.kernels.reference"))))
    for slot in range(count):
        bench.admit(slot, temperature=temperature, seed=slot, **sampling)
    slots, one_each = np.arange(count), np.ones(count, dtype=np.int32)
    rows = DraftRows.of(slots, one_each, Drafts(slots, one_each, np.full(count, 3, dtype=np.int32)))
    positions = np.tile(np.array([1, 2], dtype=np.int32), count)
    logits = LOGITS.expand(2 * count, VOCAB_SIZE).clone()
    at = Positions(positions, torch.from_numpy(positions), torch.from_numpy(rows.preceding_drafts))
    chosen = choose_by_rejection(bench.sampler.process(logits, np.repeat(slots, 2), at), rows)[::2]
    columns = {name: torch.tensor([value]) for name, value in sampling.items()}
    wanted = filtered(
        LOGITS[None], torch.tensor([temperature]), *(columns.get(name) for name in ("top_k", "top_p", "min_p"))
    )
    shares = torch.bincount(chosen.long(), minlength=VOCAB_SIZE) / count
    assert float((shares - wanted[0].softmax(0)).abs().sum()) / 2 < 0.03
