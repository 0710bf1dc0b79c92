"""Time stamps of Whisper come in pairs and rise: the same tokens are banned as in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from quire import kernels
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.step.admission import SlotAdmission
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2

VOCAB_SIZE, END, DECLINING, FIRST = 40, 19, 20, 21  # texts, the end, the declining token, then time stamps


def sampler() -> Sampler:
    return Sampler(4, VOCAB_SIZE, 0, kernels.load("cpu", ()), torch.device("cpu"))


def admission(prompt: list[int], output: list[int], steps: int | None = None, **changes: Any) -> SlotAdmission:
    given = {"first_id": FIRST, "declining_id": DECLINING, "max_initial_steps": steps, **changes}
    return SlotAdmission(
        token_ids=columns.i32_bytes(prompt + output),
        num_prompt_tokens=len(prompt),
        sampling=sampling_pb2.SamplingParams(temperature=0.0),
        eos_token_ids=columns.u32_bytes([END]),
        timestamps=worker_pb2.TimestampRules(**given),
    )


def processed(made: Sampler, slots: list[int], logits: torch.Tensor, length: int, drafts: Any = None) -> torch.Tensor:
    positions = np.full(len(slots), length, dtype=np.int32)
    at = Positions(positions, torch.from_numpy(positions), drafts)
    return made.process(logits.clone(), np.array(slots), at).logits


def expected(logits: torch.Tensor, output: list[int], steps: int | None) -> torch.Tensor:
    config = transformers.GenerationConfig(eos_token_id=END, no_timestamps_token_id=DECLINING)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = DECLINING, steps
    rules = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    return rules(torch.tensor([[1, 2, *output]]), logits.unsqueeze(0))[0]


OUTPUTS = [
    [],
    [FIRST + 2],
    [FIRST + 2, 5],
    [FIRST, 5, 7, FIRST + 4],
    [FIRST, 5, FIRST + 4, FIRST + 4],
    [FIRST, 5, FIRST + 4, FIRST + 6, 3],
    [FIRST + 1, 5, VOCAB_SIZE - 1],
    [FIRST + 1, 5, VOCAB_SIZE - 1, VOCAB_SIZE - 1],
]


@pytest.mark.parametrize("steps", [None, 0, 3])
@pytest.mark.parametrize("output", OUTPUTS)
def test_bans_are_those_of_transformers(output: list[int], steps: int | None) -> None:
    made = sampler()
    made.admit(1, admission([1, 2], output, steps))
    for seed in range(6):
        logits = 2.0 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        logits[DECLINING] = 50.0 if seed == 5 else logits[DECLINING]  # a token that declines is never sampled
        got, wanted = processed(made, [1], logits.unsqueeze(0), 2 + len(output))[0], expected(logits, output, steps)
        torch.testing.assert_close(got, wanted)


def test_an_output_of_rules_is_pairs_that_rise() -> None:
    """vllm#55281: segments collapse where the rules are left out; here any logits give whole segments."""
    for seed in range(20):
        made, generator, output = sampler(), torch.Generator().manual_seed(seed), list[int]()
        made.admit(0, admission([1, 2], [], 5))
        for step in range(30):
            rows = 3.0 * torch.randn(1, VOCAB_SIZE, generator=generator)
            positions = np.array([2 + step], dtype=np.int32)
            token = int(made.sample(rows, np.array([0]), Positions(positions, torch.from_numpy(positions))).token_ids)
            if token == END:
                break
            output.append(token)
        times = [token for token in output if token >= FIRST]
        assert times == sorted(times)
        assert FIRST <= output[0] <= FIRST + 5
        marks = "".join("t" if token >= FIRST else "w" for token in output)
        assert "ttt" not in marks
        assert not marks.startswith("tt")
        assert all(mark in ("t", "tt") for mark in marks.strip("t").replace("w", " ").split())


def test_drafts_are_seen_as_tokens_one_at_a_time() -> None:
    drafts = [FIRST + 3, 4, FIRST + 6]
    logits = torch.randn(len(drafts) + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    ahead = torch.full((len(drafts) + 1, len(drafts)), -1, dtype=torch.int32)
    for number in range(1, len(drafts) + 1):
        ahead[number, :number] = torch.tensor(drafts[:number])
    made = sampler()
    made.admit(2, admission([1, 2], []))
    together = processed(made, [2] * len(logits), logits, 2, ahead)
    for number in range(len(logits)):
        alone = sampler()
        alone.admit(2, admission([1, 2], drafts[:number]))
        torch.testing.assert_close(together[number], processed(alone, [2], logits[number : number + 1], 2 + number)[0])


def test_other_slots_and_later_sequences_have_no_rules() -> None:
    made = sampler()
    made.admit(0, admission([1, 2], []))
    made.admit(1, SlotAdmission(columns.i32_bytes([1]), 1, sampling=sampling_pb2.SamplingParams(temperature=0.0)))
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(processed(made, [0, 1], logits, 2)[1], logits[1])
    made.release(0)
    made.admit(0, SlotAdmission(columns.i32_bytes([1]), 1, sampling=sampling_pb2.SamplingParams(temperature=0.0)))
    torch.testing.assert_close(processed(made, [0, 1], logits, 2), logits)


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="timestamps: token id 99 is not below the vocabulary size, 40"):
        sampler().admit(0, admission([1], [], first_id=99))
