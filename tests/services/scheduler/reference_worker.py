"""Reference worker without a model: follows worker.proto's rules, and checks that every KV entry it reads is the right
one.

Its model is a function of the whole prefix, so that any wrong block, missing token or reordered step shows as another
text. A KV entry is the digest of the prefix that it stands for and its KV group. A recurrent state is the digest of all
tokens that have changed it: a row reads the one that earlier steps have left, and leaves one in each page that it
passes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Admission, BeamMove, Logprobs, PromptLogprobs, StepPlan, StepResult
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.transfers.orders import DiskOrder, TransferOrder
from quire.shared.kv.kv_specs import Cross, State, reach, without_cross

Entry = tuple[int, bytes]  # of a group: KV of a position, or a state
Content = tuple[list[Entry], Entry]  # of a page: KV of its positions, and the state
NOTHING: Entry = (-1, b"")
VOCAB = 50
EOS = 49
TOKEN_BYTES, DIGEST_BYTES = 4, 8


def digest(tokens: list[int]) -> bytes:
    return hashlib.sha256(array("i", tokens).tobytes()).digest()[:DIGEST_BYTES]


def digests(tokens: list[int], first: int, end: int) -> list[bytes]:
    """Returns the digests of the prefixes whose last positions are in [first, end)."""
    packed = array("i", tokens[:end]).tobytes()
    running, found = hashlib.sha256(packed[: TOKEN_BYTES * first]), []
    for start in range(TOKEN_BYTES * first, TOKEN_BYTES * end, TOKEN_BYTES):
        running.update(packed[start : start + TOKEN_BYTES])
        found.append(running.copy().digest()[:DIGEST_BYTES])
    return found


def next_token(tokens: list[int]) -> int:
    return digest(tokens)[0] % VOCAB


def candidates(tokens: list[int], most: int) -> tuple[list[int], list[float]]:
    """Returns the most likely tokens after `tokens`, best first, and their log-probabilities, derived from the
    digest."""
    words = np.frombuffer(hashlib.sha256(b"beam" + digest(tokens)).digest() * 2, dtype=np.uint8)[:VOCAB]
    weights = (words.astype(np.float64) + 1) ** 2
    logprobs = np.log(weights / weights.sum()).astype(np.float32)
    best = np.argsort(-logprobs, kind="stable")[:most]
    return best.tolist(), logprobs[best].tolist()


def oracle(prompt: list[int], limit: int, eos: bool) -> list[int]:
    """Returns the model's output for `prompt`, up to `limit` tokens in all: no blocks, no batches."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if eos and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class Slot:
    """Row of the worker's tables."""

    tokens: list[int]
    num_computed: int
    num_cached: int
    num_prompt: int
    asks_from: int  # first prompt position whose log-probabilities are due; 0: not requested
    num_candidates: int  # of a beam; 0: it is none
    samples: bool = True  # else it ends with a vector when its tokens are computed
    lag: int = 0  # drafts that were right and have changed no state yet
    blocks: list[int] = field(default_factory=list)  # of each position one for each KV group
    salt: list[int] = field(default_factory=list)  # what KV depends on besides the tokens
    attended: dict[int, bytes] = field(default_factory=dict)  # blocks of the encoder's output, and their contents

    def digests(self, first: int, end: int) -> list[bytes]:
        """Returns the digests of salt and prefixes whose last positions are in [first, end)."""
        return digests(self.salt + self.tokens, len(self.salt) + first, len(self.salt) + end)


class ReferenceWorker:
    """Executes plans in order. With drafts, it guesses right three times out of four, and often drafts less than it
    may."""

    def __init__(self, limits: CoreLimits, seed: int = 0) -> None:
        self.limits = limits
        self.num_draft_tokens = 0
        self.num_accepted = 0
        self._random = random.Random(seed)
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._windows = {
            group: reach(spec) or 1 << 40
            for group, spec in enumerate(limits.kv_specs)
            if not isinstance(spec, State | Cross)
        }
        self._states = [group for group, spec in enumerate(limits.kv_specs) if isinstance(spec, State)]
        self.states: dict[int, tuple[int, bytes]] = {}  # by block
        self._num_groups = len(without_cross(limits.kv_specs))
        self.rows: set[bytes] = set()  # items whose rows are kept
        self.cross: dict[int, bytes] = {}  # content by block: identifier of the item, and number of the block
        self.num_cross_writes = 0
        self.host: dict[int, Content] = {}  # by place
        self.disk: dict[int, tuple[bytes, Content]] = {}  # by place: the name, and what it holds
        self.num_computed_tokens = 0
        self._last_step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self._last_step + 1
        self._last_step = plan.step_id
        for slot in plan.released_slots:
            del self.slots[slot]
        for admission in plan.admitted:
            self._admit(admission)
        self._move(plan.beam_moves, dict(plan.copies))
        self._copy(plan.copies)
        if self.limits.num_speculative_tokens:
            return self._execute_with_drafts(plan)
        assert plan.num_draft_tokens is None
        assert plan.new_block_slots is None
        counts = self._counts(plan)
        assert sum(counts.values()) == plan.num_tokens <= self.limits.max_num_batched_tokens
        self._take_blocks(plan, counts)
        self._change_states(counts)
        for slot, count in counts.items():
            self._store(self.slots[slot], count)  # all stores of a step come before its reads
        prompts = self._tell_prompts(counts)
        sampled = [self._compute(self.slots[slot], count) for slot, count in counts.items()]
        tokens = [token for token in sampled if token is not None]
        sampling = [slot for slot, token in zip(counts, sampled, strict=True) if token is not None]
        told = self._tell_candidates(sampling)
        pooled = self._pool(counts)
        return StepResult(plan.step_id, np.array(tokens, dtype=np.int32), logprobs=told, prompts=prompts, pooled=pooled)

    def _pool(self, counts: dict[int, int]) -> dict[int, bytes]:
        rows = {slot: self.slots[slot] for slot in counts if not self.slots[slot].samples}
        return {slot: digest(row.tokens) for slot, row in rows.items() if row.num_computed == len(row.tokens)}

    def _tell_candidates(self, slots: list[int]) -> Logprobs | None:
        rows = [self.slots[slot] for slot in slots if self.slots[slot].num_candidates]
        if not rows:
            return None
        found = [candidates(row.tokens[:-1], row.num_candidates) for row in rows]
        ids = [[row.tokens[-1], *best] for row, (best, _) in zip(rows, found, strict=True)]
        values = [[0.0, *logprobs] for _, logprobs in found]
        return Logprobs(
            np.array([len(row) for row in ids], dtype=np.uint32),
            np.array([token for row in ids for token in row], dtype=np.int32),
            np.array([value for row in values for value in row], dtype=np.float32),
            np.ones(len(ids), dtype=np.uint32),
        )

    def _move(self, moves: list[BeamMove], copies: dict[int, int]) -> None:
        before = {move.slot: replace(self.slots[move.slot]) for move in moves}
        for move in moves:
            row, parent = self.slots[move.slot], before[move.parent]
            assert row.num_computed == parent.num_computed == len(parent.tokens) - 1, "all of one length"
            assert move.parent == move.slot or before[move.parent].blocks == self.slots[move.parent].blocks
            row.tokens = [*parent.tokens[:-1], move.token]
            row.blocks = list(parent.blocks)
            for place, block in zip(range(-self._num_groups, 0), move.last_blocks, strict=True):
                if block:
                    assert copies.get(row.blocks[place]) is not None, "a new last block is a copy"
                    row.blocks[place] = block

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self.states[target] = self.states.get(source, (-1, b""))
            self.cross.pop(target, None)
            for offset in range(self.limits.block_size):
                self.kv[target, offset] = self.kv.get((source, offset), (-1, b""))

    def _tell_prompts(self, counts: dict[int, int]) -> PromptLogprobs | None:
        """Returns prompt log-probabilities: a position's only entry is its own token, with the position as
        log-probability and rank."""
        told: dict[int, list[int]] = {}
        for slot, count in counts.items():
            row = self.slots[slot]
            first, last = max(row.num_computed + 1, row.asks_from), min(row.num_computed + count, row.num_prompt - 1)
            if row.asks_from and first <= last:
                told[slot] = list(range(first, last + 1))
        if not told:
            return None
        positions = np.concatenate([np.array(listed) for listed in told.values()])
        tokens = [self.slots[slot].tokens[position] for slot, listed in told.items() for position in listed]
        ones = np.ones(len(positions), dtype=np.uint32)
        return PromptLogprobs(
            np.array(list(told), dtype=np.uint32),
            np.array([len(listed) for listed in told.values()], dtype=np.uint32),
            Logprobs(ones, np.array(tokens, dtype=np.int32), positions.astype(np.float32), positions.astype(np.uint32)),
        )

    def _execute_with_drafts(self, plan: StepPlan) -> StepResult:
        if plan.num_draft_tokens is not None:
            assert plan.num_draft_tokens != self.num_draft_tokens, "said only when it changes"
            self.num_draft_tokens = plan.num_draft_tokens
        assert self.num_draft_tokens <= self.limits.num_speculative_tokens
        assert plan.new_block_slots is not None
        for slot, block in zip(plan.new_block_slots, plan.new_block_ids, strict=True):
            self.slots[slot].blocks.append(block)
        counts = self._counts(plan)
        drafts = {slot: self._draft(slot, plan) for slot in counts}
        most = sum(
            count + (0 if slot in plan.counted_slots else self.num_draft_tokens) for slot, count in counts.items()
        )
        assert most <= plan.num_tokens <= self.limits.max_num_batched_tokens
        self._change_states({slot: count for slot, count in counts.items() if self._room(slot) >= count})
        for slot, count in counts.items():
            if self._room(slot) >= count:
                self._store_drafts(self.slots[slot], count, drafts[slot])
        prompts = self._tell_prompts(counts)
        tokens: list[list[int]] = []
        sampling: list[int] = []
        verified = []
        for slot, count in counts.items():
            row = self.slots[slot]
            if row.num_computed + count < len(row.tokens) or not row.samples:
                self._compute(row, count)
                continue
            sampling.append(slot)
            verified.append(len(drafts[slot]))
            if self._room(slot) < count:
                assert slot not in plan.counted_slots, "what is ordered must have room"
                tokens.append([])
            else:
                tokens.append(self._verify(row, count, drafts[slot]))
        told = self._tell_candidates([slot for slot, row in zip(sampling, tokens, strict=True) if row])
        flat = np.array([token for row in tokens for token in row], dtype=np.int32)
        counted = np.array([len(row) for row in tokens], dtype=np.uint32)
        drafted = np.array(verified, dtype=np.uint32)
        pooled = self._pool(counts)
        return StepResult(plan.step_id, flat, counted, drafted, logprobs=told, prompts=prompts, pooled=pooled)

    def _room(self, slot: int) -> int:
        row = self.slots[slot]
        return len(row.blocks) // self._num_groups * self.limits.block_size - row.num_computed

    def _draft(self, slot: int, plan: StepPlan) -> list[int]:
        """Returns guesses of the next tokens."""
        row = self.slots[slot]
        if slot in plan.counted_slots or self._room(slot) < 1:
            return []
        most = min(self.num_draft_tokens, self._room(slot) - 1, self.limits.max_model_len - len(row.tokens))
        if self._states:  # the last token of a block is sure
            most = min(most, self.limits.block_size - 2 - row.num_computed % self.limits.block_size)
        drafts: list[int] = []
        while len(drafts) < most and self._random.random() < 0.9:
            right = next_token(row.tokens + drafts)
            drafts.append(right if self._random.random() < 0.75 else self._random.randrange(VOCAB))
        return drafts

    def _store_drafts(self, row: Slot, count: int, drafts: list[int]) -> None:
        first, end = max(row.num_computed, row.num_cached), row.num_computed + count + len(drafts)
        for position, content in enumerate(digests(row.tokens + drafts, first, end), first):
            self._write(row, position, content)

    def _verify(self, row: Slot, count: int, drafts: list[int]) -> list[int]:
        sampled = [self._compute(row, count)]
        for draft in drafts:
            if draft != row.tokens[-1]:
                break
            self.num_accepted += 1
            sampled.append(self._compute(row, 1))
            row.lag += 1
        return [token for token in sampled if token is not None]

    def transfer(self, order: TransferOrder) -> None:
        """Copies whole blocks to host memory, or back."""
        for block, place in zip(order.blocks, order.places, strict=True):
            if order.to_host:
                self.host[place] = self._content(block)
                continue
            entries, state = self.host[place]
            self.states[block] = state
            for offset, entry in enumerate(entries):
                self.kv[block, offset] = entry

    def _content(self, block: int) -> Content:
        entries = [self.kv.get((block, offset), NOTHING) for offset in range(self.limits.block_size)]
        return entries, self.states.get(block, NOTHING)

    def disk_transfer(self, order: DiskOrder, failing: Collection[int] = ()) -> set[int]:
        """Copies blocks to disk, or back; returns the indices of those that failed."""
        lost = set(failing)
        for number, (place, on_disk, name) in enumerate(
            zip(order.places, order.disk_places, order.hashes, strict=True)
        ):
            if number in failing:
                self.disk.pop(on_disk, None)
            elif order.to_disk:
                self.disk[on_disk] = name, self.host[place]
            elif on_disk not in self.disk or self.disk[on_disk][0] != name:
                lost.add(number)
            else:
                self.host[place] = self.disk[on_disk][1]
        return lost

    def adopt(self, blocks: list[int], prefixes: list[list[int]]) -> None:
        """Fills blocks as an earlier attachment would have: one prefix for each position."""
        for i, prefix in enumerate(prefixes):
            place = blocks[i // self.limits.block_size], i % self.limits.block_size
            self.kv[place] = 0, digest(prefix)

    def with_derived_tokens(self, plan: StepPlan) -> StepPlan:
        """Returns `plan`, as received over the wire, with the derived number of computed tokens."""
        counts = dict(zip(plan.counted_slots, plan.token_counts, strict=True))
        for slot, row in self.slots.items():
            if slot not in plan.released_slots and row.samples and row.num_computed == len(row.tokens) - 1:
                counts.setdefault(slot, 1)
        for admission in plan.admitted:
            num_tokens = len(admission.token_ids) // 4
            one_left = min(admission.num_cached_tokens, num_tokens - 1) == num_tokens - 1
            if one_left and not admission.sequence.samples_nothing:
                counts.setdefault(admission.slot, 1)
        return replace(plan, num_tokens=sum(counts.values()))

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots
        assert 0 <= admission.slot < self.limits.max_num_seqs
        tokens = np.frombuffer(admission.token_ids, dtype=np.int32).tolist()
        num_cached = admission.num_cached_tokens
        sequence = admission.sequence
        if sequence.asks_prompt_logprobs:
            assert num_cached < sequence.prompt_logprobs_from, "the cache was read where logits are wanted"
        self.slots[admission.slot] = Slot(
            tokens,
            min(num_cached, len(tokens) - 1),
            num_cached,
            sequence.num_prompt_tokens,
            sequence.prompt_logprobs_from,
            _num_candidates(sequence),
            not sequence.samples_nothing,
        )
        if self.limits.cross_length:
            self._attend(admission)

    def _attend(self, admission: Admission) -> None:
        """Stores which blocks of an encoder's output an admitted sequence reads, and writes them if they are new."""
        row, (item,) = self.slots[admission.slot], admission.sequence.media
        num_blocks = -(-item.num_embeddings // self.limits.block_size)
        row.attended = {block: item.identifier + bytes([i]) for i, block in enumerate(admission.cross_blocks)}
        assert len(row.attended) == len(admission.cross_blocks) == num_blocks
        assert 0 not in row.attended
        row.salt = list(item.identifier)
        if admission.writes_cross:
            assert item.identifier in self.rows, "rows are kept until they are used"
            self.num_cross_writes += 1
            self.cross |= row.attended
            for block, offset in itertools.product(row.attended, range(self.limits.block_size)):
                self.kv.pop((block, offset), None)

    def _counts(self, plan: StepPlan) -> dict[int, int]:
        """Returns the tokens of each slot that computes, slots ascending."""
        sampling = {slot: row for slot, row in self.slots.items() if row.samples}
        most = self.limits.num_micro_batches
        implied = {slot: row for slot, row in sampling.items() if slot % most == plan.micro_batch}
        counts = {slot: 1 for slot, row in implied.items() if row.num_computed == len(row.tokens) - 1}
        beams = {slot for slot, row in self.slots.items() if row.num_candidates}
        assert counts.keys() & beams <= set(plan.counted_slots), "beams are always named"
        counts.update(zip(plan.counted_slots, plan.token_counts, strict=True))
        return {slot: counts[slot] for slot in sorted(counts) if counts[slot]}

    def _take_blocks(self, plan: StepPlan, counts: dict[int, int]) -> None:
        ids = iter(plan.new_block_ids)
        for slot, row in sorted(self.slots.items()):
            needed = -(-(row.num_computed + counts.get(slot, 0)) // self.limits.block_size)
            row.blocks += [next(ids) for _ in range(needed * self._num_groups - len(row.blocks))]
        assert next(ids, None) is None, "block ids left over"

    def _store(self, row: Slot, count: int) -> None:
        first, end = max(row.num_computed, row.num_cached), row.num_computed + count
        for position, content in enumerate(row.digests(first, end), first):
            self._write(row, position, content)

    def _change_states(self, counts: dict[int, int]) -> None:
        """Updates the states of all rows at once: no row sees another one's update of this step."""
        before = dict(self.states)
        for slot, count in counts.items():
            row = self.slots[slot]
            assert not self._states or row.num_computed >= row.num_cached, "a token changes a state once"
            first, row.lag = row.num_computed - row.lag, 0
            for group in self._states:
                if first:
                    read, _ = self._place(row, first - 1, group)
                    assert before.get(read) == (group, digest(row.tokens[:first])), "wrong state"
                for position, content in enumerate(digests(row.tokens, first, row.num_computed + count), first):
                    written, _ = self._place(row, position, group)
                    assert written, "nothing is written into the null block"
                    self.states[written] = group, content

    def _compute(self, row: Slot, count: int) -> int | None:
        first = row.num_computed
        row.num_computed += count
        self.num_computed_tokens += count
        assert all(self.cross.get(block) == content for block, content in row.attended.items()), "wrong output"
        reads_from = {group: max(0, first - window + 1) for group, window in self._windows.items()}
        begin = min(reads_from.values(), default=row.num_computed)
        right = row.digests(begin, row.num_computed)
        for group, start in reads_from.items():
            for position in range(start, row.num_computed):
                read = self.kv.get(self._place(row, position, group))
                assert read == (group, right[position - begin]), "wrong KV"
        if row.num_computed < len(row.tokens) or not row.samples:
            return None
        row.tokens.append(next_token(row.tokens))
        return row.tokens[-1]

    def _write(self, row: Slot, position: int, content: bytes) -> None:
        for group in self._windows:
            block, offset = self._place(row, position, group)
            assert block, "nothing is written into the null block"
            self.cross.pop(block, None)
            self.kv[block, offset] = group, content

    def _place(self, row: Slot, position: int, group: int) -> tuple[int, int]:
        block, offset = divmod(position, self.limits.block_size)
        return row.blocks[block * self._num_groups + group], offset


def _num_candidates(sequence: Sequence) -> int:
    return sequence.payload.num_logprobs if sequence.is_beam else 0  # type: ignore[attr-defined]
