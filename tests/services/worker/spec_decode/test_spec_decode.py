"""Components of the worker's speculative decoding, each compared with its specification."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque

import numpy as np
import pytest
import torch

from quire.kernels import cpu
from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.sampling.accept import accept_drafts
from quire.services.worker.spec_decode.acceptance_rates import SequenceAcceptanceRates
from quire.services.worker.spec_decode.config import parse
from quire.services.worker.spec_decode.history import TokenHistory
from quire.services.worker.spec_decode.methods.ngram import NgramProposer
from quire.services.worker.spec_decode.methods.past_outputs import PastOutputs
from quire.services.worker.spec_decode.methods.suffix import SuffixProposer, SuffixRule
from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable
from quire.services.worker.step.drafts.drafts import NO_DRAFT, REJECTED, DraftRows, Drafts
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import assemble
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.pb.worker.v1 import worker_pb2 as pb

LIMITS = WorkerLimits(block_size=4, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=40, num_blocks=61)


needs_library = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))


@pytest.fixture(params=[pytest.param(True, marks=needs_library), False], ids=["compiled", "plain"])
def is_compiled(request: pytest.FixtureRequest) -> bool:
    """Runs the test with the compiled library, if available, and without."""
    return bool(request.param)


@pytest.mark.parametrize(
    ("tokens", "shortest", "longest", "count", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, []),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 1, 2, [4, 1]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [6, 2]),  # the first match
        ([5], 1, 3, 2, []),
        ([5, 5], 1, 3, 2, [5]),
        ([7, 7, 7, 7], 3, 3, 4, [7]),
    ],
)
def test_ngram_continues_the_earliest_match(
    tokens: list[int], shortest: int, longest: int, count: int, drafts: list[int], is_compiled: bool
) -> None:
    history = TokenHistory(LIMITS)
    history.start_sequence(3, array(*tokens))
    proposer = NgramProposer(shortest, longest, is_compiled=is_compiled)
    found = proposer.propose(DraftRequest(np.array([3]), array(count), history))
    assert ([] if found is None else found.token_ids.tolist()) == drafts


def slow_match(tokens: list[int], shortest: int, longest: int) -> int | None:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return start + length
    return None


@pytest.mark.parametrize(("length", "found"), [(1, 16), (30, 16), (31, 15), (34, 14), (500, 1)])
def test_a_search_is_limited_by_the_tokens_read(length: int, found: int) -> None:
    """Slots that were not searched come first in the next step."""
    asked: list[int] = []
    history = TokenHistory(WorkerLimits(4, 16, 64, 512, 61))
    for slot in range(16):
        history.start_sequence(slot, array(*[slot] * length))
    host = HostProposer()
    host.search_work, host.max_work = 10, 16 * 40
    for _ in range(4):
        drafts = host.search(
            DraftRequest(np.arange(16), np.ones(16, np.int32), history),
            lambda tokens, most: asked.append(tokens[0]) or tokens,
        )
        assert drafts is not None
        assert len(drafts.slots) == found
    assert asked == [i % 16 for i in range(4 * found)]


def test_a_slow_machine_finds_the_same_drafts() -> None:
    history = TokenHistory(WorkerLimits(4, 16, 64, 40, 61))
    for slot in range(16):
        history.start_sequence(slot, array(slot))

    def find(tokens: np.ndarray, _most: int) -> np.ndarray:
        time.sleep(0.004)
        return tokens

    drafts = HostProposer().search(DraftRequest(np.arange(16), np.ones(16, np.int32), history), find)
    assert drafts_by_slot(drafts) == {slot: [slot] for slot in range(16)}


def test_ngram_finds_the_same_as_a_plain_search(is_compiled: bool) -> None:
    rng = random.Random(0)
    for _ in range(800):
        most = rng.choice([1, 20, 1000])
        texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 14))] for _ in range(6)]
        shortest = rng.randrange(1, 4)
        longest = rng.randrange(shortest, 6)
        history = TokenHistory(LIMITS)
        for slot, text in enumerate(texts):
            history.start_sequence(slot, array(*text))
        slots = np.array(sorted(rng.sample(range(6), rng.randrange(1, 7))))
        counts = array(*[rng.randrange(1, 5) for _ in slots])
        proposer = NgramProposer(shortest, longest, max_searched_tokens=most, is_compiled=is_compiled)
        found = proposer.propose(DraftRequest(slots, counts, history))
        wanted = {}
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            end = slow_match(texts[slot], shortest, longest)
            if end is not None:
                wanted[slot] = texts[slot][end : end + count]
        assert drafts_by_slot(found) == wanted, (texts, slots, shortest, longest)


@needs_library
def test_ngram_searches_over_the_budget_come_first_in_the_next_step() -> None:
    history = TokenHistory(LIMITS)
    for slot in range(6):
        history.start_sequence(slot, array(1, 1, 1, 1))
    finder = NgramProposer(1, 1, max_searched_tokens=8)
    finder.max_work = 8
    turns = [drafts_by_slot(finder.propose(DraftRequest(np.arange(6), array(*[1] * 6), history))) for _ in range(4)]
    assert sorted(slot for turn in turns[:-1] for slot in turn) == list(range(6))
    assert turns[-1] == turns[0]


def drafts_by_slot(drafts: Drafts | None) -> dict[int, list[int]]:
    if drafts is None:
        return {}
    parts = np.split(drafts.token_ids, np.cumsum(drafts.counts)[:-1])
    return {slot: part.tolist() for slot, part in zip(drafts.slots.tolist(), parts, strict=True)}


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def proposed(proposer: SuffixProposer, history: TokenHistory, slot: int, most: int) -> list[int]:
    drafts = proposer.propose(DraftRequest(np.array([slot]), array(most), history))
    return [] if drafts is None else drafts.token_ids.tolist()


def suffix(past: int = 4, **rule: float) -> tuple[SuffixProposer, TokenHistory]:
    history = TokenHistory(LIMITS)
    values = {"max_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1} | rule
    return SuffixProposer(SuffixRule(**values), past, history), history  # type: ignore[arg-type]


def test_suffix_drafts_as_much_as_matches() -> None:
    proposer, history = suffix()
    history.start_sequence(0, array(1, 2, 3, 4, 5, 6, 9, 1, 2, 3))
    assert proposed(proposer, history, 0, 9) == [4, 5, 6]  # three tokens match
    history.start_sequence(0, array(1, 2, 3, 4, 5, 6, 9, 8, 2, 3))
    assert proposed(proposer, history, 0, 9) == [4, 5]
    wide, history = suffix(max_spec_factor=2.5)
    history.start_sequence(0, array(1, 2, 3, 4, 5, 6, 9, 8, 2, 3))
    assert proposed(wide, history, 0, 9) == [4, 5, 6, 9, 8]
    assert proposed(wide, history, 0, 2) == [4, 5]


def test_suffix_follows_the_majority_while_it_is_likely() -> None:
    proposer, history = suffix(max_spec_factor=9, min_token_prob=0.5)
    history.start_sequence(0, array(7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 6, 1))
    assert proposed(proposer, history, 0, 9) == [2, 3]  # 2 is certain, 3 follows twice out of three times
    strict, history = suffix(max_spec_factor=9, min_token_prob=0.7)
    history.start_sequence(0, array(7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 6, 1))
    assert proposed(strict, history, 0, 9) == [2]


def test_clearing_the_history_drops_past_outputs() -> None:
    proposer, history = suffix()
    for forgets in (False, True):
        history.start_sequence(0, array(30))
        proposer.start_sequence(0)
        history.extend(np.array([0]), array(3), array(20, 21, 22))
        proposer.end_sequence(0)
        history.start_sequence(1, array(20, 21))
        if forgets:
            proposer.clear_history()
        assert proposed(proposer, history, 1, 4) == ([] if forgets else [22])


def test_suffix_searches_outputs_of_ended_sequences_only() -> None:
    proposer, history = suffix(past=2)
    for number in range(3):
        history.start_sequence(0, array(30, 31, 32))
        proposer.start_sequence(0)
        history.extend(np.array([0]), array(4), array(10 + number, 20, 21, 22))
        proposer.end_sequence(0)
    history.start_sequence(1, array(5, 12, 20))
    assert proposed(proposer, history, 1, 4) == [21, 22]
    history.start_sequence(1, array(30, 31))
    assert proposed(proposer, history, 1, 4) == []  # a prompt
    kept = sum(generation.count for generation in proposer._past._generations)
    assert kept == 2


def test_past_outputs_are_indexed_incrementally() -> None:
    draw, past = random.Random(4), PastOutputs(6, indexed_at_once=7)
    outputs = [[draw.randrange(4) for _ in range(draw.randrange(2, 30))] for _ in range(5)]
    for output in outputs:
        past.add(np.array(output, dtype=np.int32))
    assert not sum(len(places) for _, places in past.places(np.array(outputs[0][:2], dtype=np.int32)))
    for _ in range(-(-sum(len(output) + 1 for output in outputs) // 7)):
        past.index()
    for pair in itertools.product(range(4), repeat=2):
        found = [tuple(text[place - 1 : place + 1]) for text, at in past.places(np.array(pair)) for place in at]
        want = sum(each == pair for output in outputs for each in itertools.pairwise(output))
        assert found == [pair] * want
        for _, places in past.places(np.array(pair)):
            assert (np.diff(places) > 0).all()


def test_suffix_never_crosses_from_one_output_to_the_next() -> None:
    proposer, history = suffix()
    for output in ([1, 2, 3], [4, 5, 6]):
        history.start_sequence(0, array(9))
        proposer.start_sequence(0)
        history.extend(np.array([0]), array(3), array(*output))
        proposer.end_sequence(0)
    history.start_sequence(1, array(7, 2, 3))
    assert proposed(proposer, history, 1, 4) == []
    history.start_sequence(1, array(7, 1, 2))
    assert proposed(proposer, history, 1, 4) == [3]


def test_sequences_with_wrong_drafts_get_shorter_ones_and_probes() -> None:
    acceptance = SequenceAcceptanceRates(4)
    slots = np.array([0, 1])
    for slot in (0, 1):
        acceptance.reset(slot)
    at_first = acceptance.draft_lengths(slots).tolist()
    for _ in range(20):
        acceptance.update(slots, array(4, 4), array(4, 0))
    lengths = [acceptance.draft_lengths(slots).tolist() for _ in range(24)]
    assert at_first == [4, 4]
    assert all(longer > 20 for longer, _ in lengths)
    assert [shorter for _, shorter in lengths].count(0) == 22
    assert max(shorter for _, shorter in lengths) == 1
    acceptance.reset(1)
    assert acceptance.draft_lengths(slots)[1] >= 1


def test_draft_rows_hold_preceding_drafts_and_the_next_draft() -> None:
    drafts = Drafts.of({4: np.array([7, 8, 9]), 1: np.array([5]), 3: np.array([], dtype=np.int32)})
    assert drafts is not None
    rows = DraftRows.of(np.array([0, 1, 4]), np.array([0, 1, 3], dtype=np.int32), drafts)
    assert rows.first_rows.tolist() == [0, 1, 3]
    assert rows.expected_ids.tolist() == [NO_DRAFT, 5, NO_DRAFT, 7, 8, 9, NO_DRAFT]
    ahead = [[-1] * 3, [-1] * 3, [5, -1, -1], [-1] * 3, [7, -1, -1], [7, 8, -1], [7, 8, 9]]
    assert rows.preceding_drafts.tolist() == ahead


@pytest.mark.parametrize(
    ("drafts", "chosen", "kept"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
        ([[], [4]], [[3], [-1, 2]], [[3], [-1]]),  # no token could be sampled
    ],
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    drafts: list[list[int]], chosen: list[list[int]], kept: list[list[int]]
) -> None:
    slots = np.arange(len(drafts)) * 2
    proposed = Drafts.of({2 * i: np.array(tokens, dtype=np.int32) for i, tokens in enumerate(drafts)})
    assert proposed is not None
    rows = DraftRows.of(slots, np.array([len(tokens) for tokens in drafts], dtype=np.int32), proposed)
    last = torch.full((8,), -9, dtype=torch.int32)
    flat = torch.tensor([token for tokens in chosen for token in tokens], dtype=torch.int32)
    ids = accept_drafts(flat, rows, last, scratch_slot=7).numpy()
    parts = np.split(ids, rows.first_rows[1:])
    assert [part[part != REJECTED].tolist() for part in parts] == kept
    assert rows.counted(ids).tolist() == [len(tokens) for tokens in kept]
    assert last[slots].tolist() == [tokens[-1] for tokens in kept]


class Table:
    """A drafting slot table with a sequence of six tokens in slot 1, two blocks, and a computed prompt."""

    def __init__(self) -> None:
        self.table = DraftingSlotTable(LIMITS, 3)
        admission = pb.Admission(slot=1, token_ids=columns.i32_bytes([9, 8, 7, 6, 5, 4]))
        self.step(admitted=[admission], counted_slots=u32(1), token_counts=u32(6), new_blocks=[(1, 5), (1, 6)])

    def step(self, new_blocks: list[tuple[int, int]], drafts: Drafts | None = None, **fields: object) -> list[int]:
        """Resolves a plan and returns the maximum drafts by slot."""
        slots, ids = u32(*(slot for slot, _ in new_blocks)), u32(*(block for _, block in new_blocks))
        order = self.table.resolve(decode_plan(pb.StepPlan(new_block_slots=slots, new_block_ids=ids, **fields)))  # type: ignore[arg-type]
        self.last = self.table.advance(order, drafts)
        self.inputs = assemble(self.last, self.table, drafts)
        self.stalled = order.stalled.tolist()
        return [] if order.max_drafts is None else order.max_drafts.tolist()


def u32(*values: int) -> bytes:
    return columns.u32_bytes(list(values))


def test_drafts_are_limited_by_the_order_and_by_blocks() -> None:
    table = Table()
    assert table.step([]) == []
    assert table.step([], num_draft_tokens=9) == [0, 0, 0, 0, 0, 0]  # position 7 is the last of two blocks
    assert table.stalled == []
    assert table.step([(1, 7)]) == [0, 3, 0, 0, 0, 0]
    assert table.step([], counted_slots=u32(1), token_counts=u32(1)) == [0] * 6
    assert table.step([], num_draft_tokens=0) == []


def test_a_slot_without_blocks_skips_the_step() -> None:
    table = Table()
    table.step([])
    table.step([])
    table.step([])
    assert table.stalled == [1]
    assert table.last.slots.tolist() == []
    table.step([(1, 9)])
    assert (table.stalled, table.last.starts.tolist()) == ([], [8])


def test_drafts_follow_the_last_token_and_count_once_accepted() -> None:
    table = Table()
    drafts = Drafts.of({1: np.array([30, 31], dtype=np.int32)})
    table.step([(1, 7)], drafts, num_draft_tokens=3)
    inputs = table.inputs
    assert inputs.positions.tolist() == [6, 7, 8]
    assert inputs.token_ids.tolist() == [0, 30, 31]
    assert (inputs.prev_sampled_tokens.tolist(), inputs.prev_sampled_slots.tolist()) == ([0], [1])
    assert inputs.sampling_tokens.tolist() == [0, 1, 2]
    assert inputs.sample_positions.tolist() == [7, 8, 9]
    assert inputs.slot_mapping.tolist() == [6 * 4 + 2, 6 * 4 + 3, 7 * 4]
    table.table.commit_accepted(np.array([1]), np.array([2], dtype=np.int32))
    table.step([])
    assert table.inputs.positions.tolist() == [8]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"new_block_ids": u32(7)}, "0 new_block_slots, 1 new_block_ids"),
        ({"new_block_ids": u32(7), "new_block_slots": u32(2)}, "not live"),
        ({"new_block_ids": u32(7, 8), "new_block_slots": u32(1, 0)}, "not ascending"),
        ({"new_block_ids": u32(61), "new_block_slots": u32(1)}, "not all in 1..60"),
        ({"new_block_ids": u32(*range(7, 16)), "new_block_slots": u32(*[1] * 9)}, "outgrows 10 blocks"),
    ],
)
def test_a_plan_that_breaks_the_rules_is_refused(fields: dict[str, bytes], text: str) -> None:
    table = Table().table
    with pytest.raises(PlanViolation, match=text):
        table.resolve(decode_plan(pb.StepPlan(**fields)))  # type: ignore[arg-type]


def test_named_slots_must_have_blocks() -> None:
    table = Table()
    table.step([])
    table.step([])
    with pytest.raises(PlanViolation, match="no blocks for what slots"):
        table.table.resolve(decode_plan(pb.StepPlan(counted_slots=u32(1), token_counts=u32(1))))


def test_history_appends_several_tokens_per_slot() -> None:
    history = TokenHistory(LIMITS)
    history.start_sequence(2, np.array([1, 2], dtype=np.int32))
    history.start_sequence(4, np.array([3], dtype=np.int32))
    history.extend(np.array([2, 4]), np.array([3, 1], dtype=np.int32), np.array([5, 6, 7, 8], dtype=np.int32))
    assert history.tokens_of(2).tolist() == [1, 2, 5, 6, 7]
    assert history.tokens_of(4).tolist() == [3, 8]
    history.start_sequence(2, np.array([9], dtype=np.int32))
    assert history.tokens_of(2).tolist() == [9]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "speculative_config: not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"method": "magic", "num_speculative_tokens": 2}', "'magic' does not exist; available: ngram, suffix"),
        ('{"method": "ngram"}', "speculative_config.num_speculative_tokens: Field required"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: .* greater than or equal to 1"),
        ('{"method": "ngram", "num_speculative_tokens": 2, "topk": 1}', "speculative_config.topk: unknown setting"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 9}',
            "prompt_lookup_min: 9 is more than prompt_lookup_max, 5",
        ),
    ],
)
def test_an_invalid_configuration_is_reported_by_field(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        parse(text)


def test_an_empty_configuration_disables_speculation() -> None:
    assert parse("") is None
    config = parse('{"method": "ngram", "num_speculative_tokens": 3}')
    assert config is not None
    assert (config.shortest_match, config.prompt_lookup_max) == (5, 5)


def test_the_history_equals_plain_lists() -> None:
    """Mixes steps with one or several tokens per slot, of the same or other slots, and slots that change their sequence
    between a step's launch and its tokens."""
    rng = random.Random(0)
    history = TokenHistory(LIMITS)
    longest = LIMITS.max_model_len + 1
    expected: list[list[int]] = [[] for _ in range(LIMITS.max_num_seqs)]  # each sequence's own list
    launched: deque[tuple[Rows, list[list[int]], int]] = deque()
    slots = np.array([0, 2, 3])

    def add(sequences: list[list[int]], parts: list[list[int]]) -> None:
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.extend([max(token, 0) for token in part][: longest - len(sequence)])

    for _ in range(4000):
        match rng.randrange(16):
            case 0:
                slot = rng.randrange(LIMITS.max_num_seqs)
                expected[slot] = [rng.randrange(99) for _ in range(rng.randrange(1, 9))]
                history.start_sequence(slot, array(*expected[slot]))
            case 1:
                slots = np.array(sorted(rng.sample(range(LIMITS.max_num_seqs), rng.randrange(0, 5))), dtype=np.intp)
            case 2 if not launched:
                parts = [[rng.randrange(-1, 99) for _ in range(rng.randrange(4))] for _ in slots]
                history.extend(slots, array(*map(len, parts)), array(*itertools.chain(*parts)))
                add([expected[slot] for slot in slots], parts)
            case 3:
                slot = rng.randrange(LIMITS.max_num_seqs)
                assert history.tokens_of(slot).tolist() == expected[slot]
                assert history.lengths.tolist() == [len(tokens) for tokens in expected]
            case _:
                launched.append((slots, [expected[slot] for slot in slots], history.num_begun))
                while len(launched) > rng.randrange(3):
                    of, sequences, num_begun = launched.popleft()
                    tokens = [rng.randrange(-1, 99) for _ in of]
                    history.append_each(of, array(*tokens), num_begun)
                    add(sequences, [[token] for token in tokens])
    assert [history.tokens_of(slot).tolist() for slot in range(LIMITS.max_num_seqs)] == expected
