"""A whole replica: failures affect single slots, and block contents are known."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.shared import columns
from quire.shared.kv.block_hash import chain, root_hash, split
from quire.shared.pb.common.v1 import finish_pb2, sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
POISON = 100


@pytest.fixture
def rig(checkpoint: Make) -> Rig:
    return Rig(checkpoint("llama").folder)


@pytest.fixture
def poisoned(checkpoint: Make, tmp_path: Path) -> Rig:
    """Checkpoint in which the embedding of one token is NaN."""
    folder = Path(shutil.copytree(checkpoint("llama").folder, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return Rig(folder)


def failures(rig: Rig) -> dict[int, int]:
    """Error codes by slot."""
    return {failure.slot: failure.error.code for failure in rig.last_result.failures}


def held(rig: Rig) -> dict[int, bytes]:
    report = rig.replica.end_epoch()
    return dict(zip(report.block_ids, split(report.hashes), strict=True))


def expected(tokens: list[int], blocks: tuple[int, ...], num_computed: int) -> dict[int, bytes]:
    known = tokens[: num_computed // 4 * 4]
    return dict(zip(blocks, chain(root_hash(), columns.i32_bytes(known), 4), strict=False))


def test_nan_logits_fail_their_slot_and_no_other(poisoned: Rig) -> None:
    poisoned.step([New(0, [1, 2, 3]), New(1, [4, POISON, 6]), New(2, [7, 8])], {0: 3, 1: 3, 2: 2})
    assert failures(poisoned) == {1: finish_pb2.ERROR_CODE_INTERNAL}
    assert "NaN" in poisoned.last_result.failures[0].error.message
    poisoned.step()
    assert failures(poisoned) == {1: finish_pb2.ERROR_CODE_INTERNAL}
    poisoned.scheduler.free += poisoned.blocks(1)
    poisoned.step([New(3, [1, 2, 3])], {3: 3}, released=[1])
    assert failures(poisoned) == {}
    assert poisoned.tokens(3)[3] == poisoned.tokens(0)[3]


def test_sequence_that_bans_every_token_gets_an_error(rig: Rig) -> None:
    stops = {"allowed_token_ids": [9], "stop_token_ids": [9]}
    for slot, min_tokens in ((0, 0), (1, 2)):
        rig.step([New(slot, [5, 6], sampling=sampling_pb2.SamplingParams(**stops, min_tokens=min_tokens))], {slot: 2})
    assert failures(rig) == {1: finish_pb2.ERROR_CODE_INVALID_ARGUMENT}
    error = rig.last_result.failures[0].error
    assert (error.field, error.message) == (
        "allowed_token_ids",
        "every token is banned: none that allowed_token_ids allow is permitted by min_tokens",
    )


@pytest.mark.parametrize(
    ("new", "code"),
    [
        (New(1, [1, VOCAB_SIZE]), finish_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (New(1, [1, -1]), finish_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (New(1, [1, 2], sampling=sampling_pb2.SamplingParams(logprobs=99)), finish_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (
            New(1, [1, 2], sampling=sampling_pb2.SamplingParams(prompt_logprobs=99)),
            finish_pb2.ERROR_CODE_INVALID_ARGUMENT,
        ),
    ],
)
def test_invalid_sequence_is_refused_when_it_would_sample(rig: Rig, new: New, code: int) -> None:
    rig.step([New(0, [5, 6, 7]), new], {0: 3, 1: 1})
    assert failures(rig) == {}
    rig.step()
    assert failures(rig) == {1: code}
    rig.step(released=[1])
    assert failures(rig) == {}


def test_refused_sequence_still_fills_its_blocks(rig: Rig) -> None:
    tokens = [*range(1, 13), VOCAB_SIZE]
    wrong = sampling_pb2.SamplingParams(logprobs=99)
    rig.step([New(0, tokens), New(1, [9, *tokens[1:12]], sampling=wrong)], {0: 13, 1: 12})
    assert failures(rig).keys() == {0, 1}
    both = expected(tokens, rig.blocks(0), 12) | expected([9, *tokens[1:12]], rig.blocks(1), 12)
    assert held(rig) == both


def test_results_carry_one_token_for_each_sampling_slot_and_where_the_time_went(rig: Rig) -> None:
    rig.step([New(4, [1, 2]), New(2, [3, 4, 5]), New(0, [6, 7])], {0: 1, 2: 3, 4: 2})
    result = rig.last_result
    assert len(columns.i32(result.token_ids)) == 2
    assert result.token_counts == b""
    assert not result.HasField("logprobs")
    assert result.timings.forward_us > 0


def test_a_step_that_computes_nothing_has_a_result(rig: Rig) -> None:
    rig.step([New(0, [1, 2])], {0: 2})
    rig.step(released=[0])
    assert rig.last_result == pb.StepResult(epoch=1, step_id=2, timings=rig.last_result.timings)


def test_logprobs_of_the_slots_that_asked(rig: Rig) -> None:
    asks = sampling_pb2.SamplingParams(temperature=0.0, logprobs=2)
    rig.step([New(0, [1, 2]), New(1, [3, 4], sampling=asks), New(2, [1, 2], sampling=asks)], {0: 2, 1: 2, 2: 2})
    found = rig.last_result.logprobs
    assert columns.u32(found.entry_counts).tolist() == [3, 3]
    assert columns.u32(found.ranks).tolist() == [1, 1]
    ids = columns.i32(found.token_ids).reshape(2, 3)
    sampled = columns.i32(rig.last_result.token_ids)
    assert ids[:, 0].tolist() == sampled[1:].tolist()
    row = rig.logits[2][0].log_softmax(0)
    assert columns.f32(found.logprobs)[3:].tolist() == pytest.approx(row[ids[1].tolist()].tolist(), abs=1e-6)


def test_held_blocks_of_live_and_of_released_slots(rig: Rig) -> None:
    rig.step([New(0, list(range(10, 19))), New(1, list(range(30, 37)))], {0: 9, 1: 7})
    for _ in range(4):
        rig.step()
    released_tokens, released_blocks = list(rig.tokens(0)), rig.blocks(0)
    rig.step(released=[0])
    live_tokens, live_blocks = list(rig.tokens(1)), rig.blocks(1)
    found = held(rig)
    # Of either the last token has been sampled but not computed.
    assert found == expected(released_tokens, released_blocks, 13) | expected(live_tokens, live_blocks, 12)


def test_reported_blocks_after_a_shared_prefix(rig: Rig) -> None:
    head = list(range(10, 18))
    rig.step([New(0, head)], {0: 8})
    shared = rig.blocks(0)
    rig.step([New(1, [*head, 1, 2, 3, 4], cached_blocks=shared), New(2, head, cached_blocks=shared)], {0: 0, 1: 4})
    found = held(rig)
    assert found == expected([*head, 1, 2, 3, 4], rig.blocks(1), 12)


def test_blocks_on_their_way_to_another_sequence_lose_their_record(rig: Rig) -> None:
    rig.step([New(0, list(range(10, 18)))], {0: 8})
    rig.scheduler.free += rig.blocks(0)
    rig.step([New(1, list(range(40, 46)))], {1: 5}, released=[0])
    assert held(rig) == expected(list(range(40, 46)), rig.blocks(1), 5)


def test_the_record_outlives_an_epoch_and_slots_do_not(rig: Rig) -> None:
    rig.step([New(0, list(range(10, 18)))], {0: 8})
    first = held(rig)
    assert len(first) == 2
    rig.scheduler.rows.clear()
    rig.step([New(0, [1, 2])], {0: 2})
    assert held(rig) == first


def test_a_cache_reset_clears_the_record(rig: Rig) -> None:
    rig.step([New(0, list(range(10, 18)))], {0: 8})
    rig.replica.reset_cache()
    assert held(rig) == {}


def test_occupancy_distinguishes_owned_and_cached_blocks(rig: Rig) -> None:
    rig.step([New(0, list(range(10, 18))), New(1, [1, 2, 3])], {0: 8, 1: 3})
    rig.step(counts={0: 0}, released=[1])
    occupancy = rig.replica.occupancy()
    assert (occupancy.num_live, occupancy.num_used_blocks, occupancy.num_cached_blocks) == (1, 2, 0)
    rig.step(released=[0])
    occupancy = rig.replica.occupancy()
    assert (occupancy.num_live, occupancy.num_used_blocks, occupancy.num_cached_blocks) == (0, 0, 2)


def test_batching_does_not_change_output(rig: Rig, checkpoint: Make) -> None:
    """Seeded sampling, alone and together."""
    sampling = [sampling_pb2.SamplingParams(temperature=0.9, seed=slot, top_p=0.9) for slot in range(4)]
    prompts = [torch.arange(slot, slot + 6).tolist() for slot in range(4)]
    rig.step([New(s, prompts[s], sampling=sampling[s]) for s in range(4)], dict.fromkeys(range(4), 6))
    for _ in range(11):
        rig.step()
    for slot in range(4):
        alone = Rig(checkpoint("llama").folder)
        alone.step([New(0, prompts[slot], sampling=sampling[slot])], {0: 6})
        for _ in range(11):
            alone.step()
        assert alone.tokens(0) == rig.tokens(slot)


@torch.inference_mode()
def test_steps_may_be_launched_before_earlier_ones_are_recorded(rig: Rig, checkpoint: Make) -> None:
    """As on a device that computes while the host prepares the next step."""
    plans = [rig.scheduler.plan([New(0, list(range(10, 17)))], {0: 7}), *(rig.scheduler.plan() for _ in range(6))]
    flights = [rig.replica.launch(decode_plan(plan)) for plan in plans]
    for flight in flights:
        outcome = flight.launch.wait()
        rig.replica.record(flight, outcome)
        rig.scheduler.take(encode_result(flight.result(outcome, wait_us=0)))
    calm = Rig(checkpoint("llama").folder)
    calm.step([New(0, list(range(10, 17)))], {0: 7})
    for _ in range(6):
        calm.step()
    assert rig.tokens(0) == calm.tokens(0)
    assert held(rig) == expected(rig.tokens(0), rig.blocks(0), 13)


def test_params_that_are_none_refuse_their_sequence_alone(rig: Rig) -> None:
    """The parameters are not validated between the frontend and the worker."""
    plan = rig.scheduler.plan([New(0, [1, 2, 3]), New(1, [4, 5, 6])], {0: 3, 1: 3})
    plan.admitted[1].params = b"\xff"
    rig.last_result = rig.execute(plan)
    assert failures(rig) == {1: finish_pb2.ERROR_CODE_INVALID_ARGUMENT}
    assert "SequenceParams" in rig.last_result.failures[0].error.message
