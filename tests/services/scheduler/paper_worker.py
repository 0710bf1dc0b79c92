"""A worker on paper: follows worker.proto's rules, and checks that every KV entry it reads is the one it should be.

Its model is a function of the whole prefix, so that any wrong block, missing token or reordered step shows as another
text. A KV entry is the digest of the prefix that it stands for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from services.scheduler.core.limits import Limits
from services.scheduler.core.plan import Admission, StepPlan, StepResult

VOCAB = 50
EOS = 49


def digest(tokens: list[int]) -> bytes:
    return hashlib.sha256(np.array(tokens, dtype=np.int32).tobytes()).digest()[:8]


def next_token(tokens: list[int]) -> int:
    return digest(tokens)[0] % VOCAB


def oracle(prompt: list[int], limit: int, eos: bool) -> list[int]:
    """What the model says to `prompt`, up to `limit` tokens in all: no blocks, no batches."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if eos and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class Slot:
    """A row of the worker's tables."""

    tokens: list[int]
    num_computed: int
    num_cached: int
    blocks: list[int] = field(default_factory=list)


class PaperWorker:
    """Executes plans in order."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        self.num_computed_tokens = 0
        self._last_step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self._last_step + 1
        self._last_step = plan.step_id
        for slot in plan.released_slots:
            del self.slots[slot]
        for admission in plan.admitted:
            self._admit(admission)
        counts = self._counts(plan)
        assert sum(counts.values()) == plan.num_tokens <= self.limits.max_num_batched_tokens
        self._take_blocks(plan, counts)
        for slot, count in counts.items():
            self._store(self.slots[slot], count)  # all stores of a step come before its reads
        sampled = [self._compute(self.slots[slot], count) for slot, count in counts.items()]
        tokens = [token for token in sampled if token is not None]
        return StepResult(plan.step_id, np.array(tokens, dtype=np.int32))

    def adopt(self, blocks: list[int], prefixes: list[list[int]]) -> None:
        """Blocks filled in an earlier life: one prefix for each position."""
        for i, prefix in enumerate(prefixes):
            place = blocks[i // self.limits.block_size], i % self.limits.block_size
            self.kv[place] = digest(prefix)

    def with_derived_tokens(self, plan: StepPlan) -> StepPlan:
        """`plan` as it came over the wire, which does not say how many tokens it computes."""
        counts = dict(zip(plan.counted_slots, plan.token_counts, strict=True))
        for slot, row in self.slots.items():
            if slot not in plan.released_slots and row.num_computed == len(row.tokens) - 1:
                counts.setdefault(slot, 1)
        for admission in plan.admitted:
            num_tokens = len(admission.token_ids) // 4
            if min(admission.num_cached_tokens, num_tokens - 1) == num_tokens - 1:
                counts.setdefault(admission.slot, 1)
        return replace(plan, num_tokens=sum(counts.values()))

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots
        assert 0 <= admission.slot < self.limits.max_num_seqs
        tokens = np.frombuffer(admission.token_ids, dtype=np.int32).tolist()
        num_cached = admission.num_cached_tokens
        self.slots[admission.slot] = Slot(tokens, min(num_cached, len(tokens) - 1), num_cached)

    def _counts(self, plan: StepPlan) -> dict[int, int]:
        """Tokens of each slot that computes, slots ascending."""
        counts = {slot: 1 for slot, row in self.slots.items() if row.num_computed == len(row.tokens) - 1}
        counts.update(zip(plan.counted_slots, plan.token_counts, strict=True))
        return {slot: counts[slot] for slot in sorted(counts) if counts[slot]}

    def _take_blocks(self, plan: StepPlan, counts: dict[int, int]) -> None:
        ids = iter(plan.new_block_ids)
        for slot, count in counts.items():
            row = self.slots[slot]
            needed = -(-(row.num_computed + count) // self.limits.block_size)
            row.blocks += [next(ids) for _ in range(needed - len(row.blocks))]
        assert next(ids, None) is None, "block ids left over"

    def _store(self, row: Slot, count: int) -> None:
        for position in range(row.num_computed, row.num_computed + count):
            if position >= row.num_cached:
                self.kv[self._place(row, position)] = digest(row.tokens[: position + 1])

    def _compute(self, row: Slot, count: int) -> int | None:
        row.num_computed += count
        self.num_computed_tokens += count
        for position in range(row.num_computed):
            assert self.kv.get(self._place(row, position)) == digest(row.tokens[: position + 1]), "wrong KV"
        if row.num_computed < len(row.tokens):
            return None
        row.tokens.append(next_token(row.tokens))
        return row.tokens[-1]

    def _place(self, row: Slot, position: int) -> tuple[int, int]:
        return row.blocks[position // self.limits.block_size], position % self.limits.block_size
