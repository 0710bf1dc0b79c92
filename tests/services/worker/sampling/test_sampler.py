"""Each sampling feature affects its own rows as documented, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.sampler import SampledTokens, Sampler
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.result import LogprobEntries
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2

VOCAB_SIZE = 12
NUM_SLOTS = 6
MAX_LOGPROBS = 5
LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.0, 1.0, -3.0, 0.5, 0.3, 1.2, -0.5, 0.8])  # best: 1, 3, 9, 5, 11
NEG_INF = float("-inf")


@dataclass
class Bench:
    """A sampler whose slots count their positions; every step starts from LOGITS."""

    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: str = "raw_logprobs"
    num_slots: int = NUM_SLOTS
    packages: tuple[str, ...] = ()
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ops, device, mode = kernels.load("cpu", self.packages), torch.device("cpu"), self.logprobs_mode
        self.sampler = Sampler(self.num_slots, VOCAB_SIZE, self.max_logprobs, ops, device, logprobs_mode=mode)

    def admit(self, slot: int, prompt: list[int] | None = None, output: list[int] | None = None, **fields: Any) -> None:
        prompt, output = prompt or [0], output or []
        eos, bad_words = fields.pop("eos", []), fields.pop("bad_words", [])
        marks = {name: columns.i32_bytes(ids) for name, ids in fields.pop("marks", {}).items()}
        self.lengths[slot] = len(prompt + output)
        self.sampler.admit(
            slot,
            SlotAdmission(
                token_ids=columns.i32_bytes(prompt + output),
                num_prompt_tokens=len(prompt),
                sampling=sampling_pb2.SamplingParams(**{"temperature": 0.0, **fields}),
                eos_token_ids=columns.u32_bytes(eos),
                bad_word_token_ids=[columns.i32_bytes(word) for word in bad_words],
                **marks,
            ),
        )

    def release(self, slot: int) -> None:
        del self.lengths[slot]
        self.sampler.release(slot)

    def run(self, *slots: int, logits: torch.Tensor = LOGITS) -> tuple[SampledTokens, torch.Tensor]:
        """Returns the sampled tokens, and the logits that they were drawn from."""
        slots = slots or tuple(sorted(self.lengths))
        rows = logits.expand(len(slots), -1).clone()
        positions = np.array([self.lengths[slot] for slot in slots], dtype=np.int32)
        sampled = self.sampler.sample(rows, np.array(slots), Positions(positions, torch.from_numpy(positions)))
        for slot in slots:
            self.lengths[slot] += 1
        return sampled, rows

    def tokens(self, *slots: int) -> list[int]:
        return self.run(*slots)[0].token_ids.tolist()

    def logits(self, *slots: int) -> torch.Tensor:
        return self.run(*slots)[1]


def test_greedy_slots_take_the_likeliest_token() -> None:
    bench = Bench()
    bench.admit(0)
    bench.admit(3, temperature=1e-6)
    assert bench.tokens() == [1, 1]


def test_a_seeded_slot_samples_the_same_in_any_batch() -> None:
    alone, among = Bench(), Bench()
    for bench in (alone, among):
        bench.admit(2, temperature=1.3, seed=77, top_p=0.95)
    among.admit(0, temperature=0.7, seed=3, top_k=3)
    among.admit(4)
    for _ in range(30):
        assert alone.tokens() == among.tokens()[1:2]


def test_a_migrated_sequence_samples_the_same() -> None:
    """The new worker gets the tokens so far with the admission."""
    stays, moves = Bench(), Bench()
    stays.admit(0, prompt=[4, 5], temperature=1.0, seed=9, presence_penalty=0.5)
    output = [stays.tokens()[0] for _ in range(5)]
    moves.admit(3, prompt=[4, 5], output=output, temperature=1.0, seed=9, presence_penalty=0.5)
    for _ in range(20):
        assert stays.tokens() == moves.tokens()


def test_unset_fields_have_the_protocols_defaults() -> None:
    """Temperature 1 and no filter: over many positions every token is sampled."""
    bench = Bench()
    admission = SlotAdmission(token_ids=columns.i32_bytes([0]), num_prompt_tokens=1)
    bench.sampler.admit(0, admission)
    bench.lengths[0] = 1
    assert {bench.tokens()[0] for _ in range(600)} == set(range(VOCAB_SIZE))


def test_min_tokens_bans_end_tokens_until_the_minimum() -> None:
    bench = Bench()
    bench.admit(0, prompt=[0, 0, 0], min_tokens=2, stop_token_ids=[3, 99], eos=[1])
    bench.admit(1, prompt=[0])
    assert [bench.tokens() for _ in range(3)] == [[9, 1], [9, 1], [1, 1]]


def test_min_tokens_counts_output_from_before_a_migration() -> None:
    bench = Bench()
    bench.admit(0, prompt=[0, 0, 0], output=[5], min_tokens=2, eos=[1])
    assert [bench.tokens()[0] for _ in range(2)] == [3, 1]


def test_logit_bias() -> None:
    bench = Bench()
    bench.admit(0)
    bench.admit(1, logit_bias={6: 10.0, 1: -100.0})
    _, rows = bench.run()
    expected = LOGITS.clone()
    expected[6] += 10
    expected[1] -= 100
    assert torch.equal(rows[0], LOGITS)
    torch.testing.assert_close(rows[1], expected)


def test_allowed_token_ids() -> None:
    bench = Bench()
    bench.admit(0, allowed_token_ids=[2, 6, 2])
    bench.admit(1)
    _, rows = bench.run()
    assert [i for i in range(VOCAB_SIZE) if rows[0, i] > NEG_INF] == [2, 6]
    assert torch.equal(rows[0, [2, 6]], LOGITS[[2, 6]])
    assert torch.equal(rows[1], LOGITS)


def test_bad_words_of_one_token_are_always_banned() -> None:
    bench = Bench()
    bench.admit(0, bad_words=[[1], [9]])
    assert [bench.tokens()[0] for _ in range(2)] == [3, 3]


def test_bad_words_are_banned_where_they_would_be_completed() -> None:
    bench = Bench()
    bench.admit(0, bad_words=[[1, 1, 1], [3, 1]])
    bench.admit(1)
    assert [bench.tokens() for _ in range(6)] == [[1, 1], [1, 1], [3, 1], [3, 1], [3, 1], [3, 1]]


def test_bad_words_match_the_output_only_including_that_from_before_a_migration() -> None:
    bench = Bench()
    bench.admit(0, prompt=[7, 1], bad_words=[[1, 1]])
    bench.admit(1, prompt=[7], output=[1], bad_words=[[1, 1]])
    assert bench.tokens() == [1, 3]


def test_admitting_a_longer_bad_word_keeps_shorter_ones_working() -> None:
    bench = Bench()
    bench.admit(0, bad_words=[[1, 1]])
    assert bench.tokens() == [1]
    bench.admit(1, bad_words=[[9, 9, 9, 9, 9]])
    assert [bench.tokens() for _ in range(3)] == [[3, 1], [1, 1], [3, 1]]


def penalised(logits: torch.Tensor, counts: dict[int, int], presence: float, frequency: float) -> torch.Tensor:
    out = logits.clone()
    for token, count in counts.items():
        out[token] -= presence + frequency * count
    return out


def test_presence_and_frequency_penalties_count_the_output() -> None:
    bench = Bench()
    bench.admit(0, prompt=[1, 5], output=[3, 3, 9], presence_penalty=0.5, frequency_penalty=0.25)
    bench.admit(1)
    _, rows = bench.run()
    torch.testing.assert_close(rows[0], penalised(LOGITS, {3: 2, 9: 1}, 0.5, 0.25))
    assert torch.equal(rows[1], LOGITS)
    _, rows = bench.run()  # 1 was sampled
    torch.testing.assert_close(rows[0], penalised(LOGITS, {1: 1, 3: 2, 9: 1}, 0.5, 0.25))


def test_repetition_penalty_counts_prompt_and_output() -> None:
    bench = Bench()
    bench.admit(0, prompt=[1, 6], output=[3], repetition_penalty=2.0)
    expected = LOGITS.clone()
    expected[[1, 3]] /= 2
    expected[6] *= 2
    torch.testing.assert_close(bench.logits()[0], expected)


def test_a_reused_slot_starts_without_penalties_or_counts() -> None:
    bench = Bench()
    for slot in range(NUM_SLOTS):
        bench.admit(slot, output=[1, 1, 3], frequency_penalty=2.0, presence_penalty=2.0)
    bench.tokens()
    for slot in range(NUM_SLOTS):
        bench.release(slot)
    bench.admit(2)
    bench.admit(4, frequency_penalty=1.0)
    assert torch.equal(bench.logits(), LOGITS.expand(2, -1))


def test_features_are_applied_in_order() -> None:
    """Allowed ids limit all others; penalties come after bias."""
    bench = Bench()
    bench.admit(0, output=[5], allowed_token_ids=[5, 6], logit_bias={6: 6.0}, presence_penalty=1.0, bad_words=[[5]])
    assert bench.tokens() == [6]
    _, rows = bench.run()
    assert rows[0, 6].item() == pytest.approx(-3.0 + 6.0 - 1.0)
    assert rows[0, 5] == NEG_INF


def test_a_row_without_allowed_tokens_fails_alone() -> None:
    bench = Bench()
    bench.admit(0, allowed_token_ids=[5], bad_words=[[5]])
    bench.admit(1)
    assert bench.tokens() == [-1, 1]
    assert bench.tokens() == [-1, 1]


def entries(sampled: SampledTokens) -> LogprobEntries:
    found = sampled.logprobs
    assert found is not None
    return found.columns(found.token_ids.numpy(), found.logprobs.numpy(), found.ranks.numpy())


def test_logprobs_of_the_sampled_token_and_the_best() -> None:
    bench = Bench()
    bench.admit(0)
    bench.admit(1, logprobs=3)
    bench.admit(2, logprobs=0, allowed_token_ids=[5])
    sampled, _ = bench.run()
    found, expected = entries(sampled), LOGITS.log_softmax(0)
    assert found.entry_counts.tolist() == [4, 1]
    ids = found.token_ids.tolist()
    assert ids == [1, 1, 3, 9, 5]
    assert found.logprobs.tolist() == pytest.approx(expected[ids].tolist(), abs=1e-6)
    assert found.ranks.tolist() == [1, 4]


def test_raw_logprobs_ignore_changes_of_the_logits() -> None:
    bench = Bench()
    bench.admit(0, logprobs=2, temperature=0.5, logit_bias={6: 50.0}, seed=1)
    sampled, _ = bench.run()
    found = entries(sampled)
    assert found.token_ids.tolist() == [6, 1, 3]
    assert found.ranks.tolist() == [VOCAB_SIZE]
    assert found.logprobs[0] == pytest.approx(LOGITS.log_softmax(0)[6].item(), abs=1e-6)


def test_logprobs_of_the_whole_vocabulary() -> None:
    bench = Bench(max_logprobs=VOCAB_SIZE)
    bench.admit(0, logprobs=-1)
    sampled, _ = bench.run()
    found = entries(sampled)
    assert found.entry_counts.tolist() == [VOCAB_SIZE + 1]
    assert found.token_ids[1:].tolist() == LOGITS.argsort(descending=True).tolist()


def test_rows_without_a_token_have_no_logprobs() -> None:
    bench = Bench()
    for slot, fields in enumerate(({}, {"allowed_token_ids": [5], "bad_words": [[5]]}, {})):
        bench.admit(slot, logprobs=slot, **fields)
    found = entries(bench.run()[0])
    assert found.entry_counts.tolist() == [1, 3]
    assert found.ranks.tolist() == [1, 1]


def test_a_refused_slot_samples_with_defaults() -> None:
    bench = Bench()
    bench.lengths[0] = 1
    with pytest.raises(InvalidArgument):
        bench.admit(0, logprobs=2, bad_words=[[VOCAB_SIZE]])
    sampled, rows = bench.run()
    assert sampled.logprobs is None
    assert torch.equal(rows[0], LOGITS)


def test_logprobs_are_absent_unless_requested() -> None:
    bench = Bench()
    bench.admit(0)
    assert bench.run()[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "field_name"),
    [
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"bad_words": [[1, VOCAB_SIZE]]}, "bad_words"),
    ],
)
def test_invalid_parameters_are_refused(fields: dict[str, Any], field_name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        Bench().admit(0, **fields)
    assert refusal.value.field == field_name


def test_logprobs_of_named_tokens_come_in_the_order_of_the_names() -> None:
    bench = Bench()
    bench.admit(0, logprob_token_ids=[6, 1, 2, 6, 0, 4, 7])
    bench.admit(1, logprobs=2)
    bench.admit(2, logprobs=4, logprob_token_ids=[10])
    sampled, _ = bench.run()
    found = entries(sampled)
    assert found.entry_counts.tolist() == [8, 3, 2]
    ids = found.token_ids.tolist()
    assert ids == [1, 6, 1, 2, 6, 0, 4, 7, 1, 1, 3, 1, 10]
    assert found.logprobs.tolist() == pytest.approx(LOGITS.log_softmax(0)[ids].tolist(), abs=1e-6)


def test_more_names_than_the_vocabulary_has() -> None:
    bench = Bench()
    bench.admit(0, logprob_token_ids=[5] * 20)
    bench.admit(1, logprobs=1)
    found = entries(bench.run()[0])
    assert found.token_ids.tolist() == [1, *[5] * 20, 1, 1]


def test_the_whole_vocabulary_may_be_requested_without_a_limit() -> None:
    bench = Bench(max_logprobs=-1)
    bench.admit(0, logprobs=-1)
    assert entries(bench.run()[0]).entry_counts.tolist() == [VOCAB_SIZE + 1]


PROCESSED = torch.tensor([NEG_INF] * VOCAB_SIZE)
PROCESSED[[1, 6]] = torch.tensor([2.0, 2.5]) / 0.5


@pytest.mark.parametrize(
    ("mode", "values"),
    [
        ("raw_logprobs", LOGITS.log_softmax(0)),
        ("raw_logits", LOGITS),
        ("processed_logprobs", PROCESSED.log_softmax(0)),
        ("processed_logits", PROCESSED),
    ],
)
def test_modes_of_logprobs(mode: str, values: torch.Tensor) -> None:
    """Bias raises token 6 above 1, the temperature halves logits, the filter keeps two tokens."""
    bench = Bench(logprobs_mode=mode)
    bench.admit(0)
    bench.admit(1, logprobs=2, temperature=0.5, top_k=2, logit_bias={6: 5.5}, seed=1)
    bench.admit(2, logprobs=1)
    found = entries(bench.run()[0])
    ids, numbers = found.token_ids.tolist(), found.logprobs.tolist()
    assert ids[0] in (1, 6)
    assert ids[1:3] == ([6, 1] if "processed" in mode else [1, 3])
    assert numbers[:3] == pytest.approx(values[ids[:3]].tolist(), abs=1e-6)
    assert found.ranks.tolist() == [int((values >= values[ids[0]]).sum()), 1]
    greedy = LOGITS if "logits" in mode else LOGITS.log_softmax(0)
    assert numbers[3:] == pytest.approx([greedy[1].item()] * 2, abs=1e-6), (
        "greedy rows have neither temperature nor filters"
    )


THINK, DONE = 10, 7


def think(bench: Bench, slot: int, budget: int, **admission: Any) -> None:
    marks = {"think_start_token_ids": [THINK], "think_end_token_ids": [DONE], **admission.pop("marks", {})}
    bench.admit(slot, thinking_token_budget=budget, marks=marks, **admission)


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_opened_by_the_prompt_ends_within_its_budget(budget: int) -> None:
    bench = Bench()
    think(bench, 0, budget, prompt=[4, THINK])
    bench.admit(1)
    assert [bench.tokens() for _ in range(6)] == [[1, 1]] * budget + [[DONE, 1]] + [[1, 1]] * (5 - budget)


def test_every_reasoning_section_of_the_output_is_bounded() -> None:
    bench = Bench()
    think(bench, 0, 2)
    opens = LOGITS.clone()
    opens[THINK] = 9.0
    assert bench.tokens() == [1]
    for _ in range(2):
        assert bench.run(logits=opens)[0].token_ids.tolist() == [THINK]
        assert [bench.tokens()[0] for _ in range(4)] == [1, 1, DONE, 1]


def test_reasoning_within_the_budget_is_unchanged() -> None:
    bench = Bench()
    think(bench, 0, 3, prompt=[THINK])
    ends = LOGITS.clone()
    ends[DONE] = 9.0
    bench.run(logits=ends)
    assert [bench.tokens()[0] for _ in range(6)] == [1] * 6


def test_a_migrated_sequence_continues_counting() -> None:
    bench = Bench()
    think(bench, 0, 3, prompt=[DONE, THINK], output=[1, 1])
    think(bench, 1, 3, prompt=[THINK], output=[1, 1, 1, DONE])
    think(bench, 2, 3, prompt=[DONE, THINK], output=[THINK, 1, 1])
    assert [bench.tokens() for _ in range(3)] == [[1, 1, DONE], [DONE, 1, 1], [1, 1, 1]]


def test_a_start_marker_inside_a_section_does_not_reset_the_count() -> None:
    bench = Bench()
    think(bench, 0, 3)
    opens = LOGITS.clone()
    opens[THINK] = 9.0
    assert [bench.run(logits=opens)[0].token_ids.tolist()[0] for _ in range(5)] == [*[THINK] * 4, DONE]


def test_markers_of_several_tokens_and_an_end_that_other_features_ban() -> None:
    bench = Bench()
    marks = {"think_start_token_ids": [4, 4], "think_end_token_ids": [7, 7, 8]}
    think(bench, 0, 2, prompt=[4, 4], marks=marks, allowed_token_ids=[3, 4])
    think(bench, 1, 1, prompt=[4, 4], output=[1, 7], marks=marks)
    think(bench, 2, 0, prompt=[4], marks=marks)
    assert [bench.tokens() for _ in range(6)] == [
        [3, 7, 1], [3, 8, 1], [7, 1, 1], [7, 1, 1], [8, 1, 1], [3, 1, 1]
    ]  # fmt: skip


def test_an_unknown_logits_processor_is_refused_without_side_effects() -> None:
    bench = Bench()
    with pytest.raises(
        InvalidArgument, match="logits_processors: 'nobodys' does not exist on this worker; available: none"
    ):
        bench.admit(0, logits_processors={"nobodys": ""}, logit_bias={1: 100.0})
    bench.admit(0)
    assert bench.logits(0)[0].tolist() == LOGITS.tolist()
