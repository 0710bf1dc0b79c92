"""Steps replayed from a tape equal, bit for bit, the same kernels called one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.families.llama import LlamaForCausalLM
from quire.services.worker.models.taped import TapedModel
from quire.shared.pb.common.v1 import sampling_pb2
from tests.kernels.cpu.closeness import needs_library
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import current_model_of, runner_of, whole_model_of
from tests.services.worker.rig import Rig

pytestmark = pytest.mark.skipif(**needs_library)

Make = Callable[[str], Checkpoint]

SAMPLINGS = [
    sampling_pb2.SamplingParams(temperature=0.0),
    sampling_pb2.SamplingParams(temperature=0.9, seed=4),
    sampling_pb2.SamplingParams(temperature=0.7, seed=1, top_k=20, frequency_penalty=0.4, logprobs=2),
]


def rigs_of(made: Checkpoint, dtype: str) -> list[Rig]:
    """Builds a rig with a tape and one without."""
    taped, called = (
        Rig(made.folder, attention_backend="auto", dtype=dtype, threads=2, num_blocks=400) for _ in range(2)
    )
    assert isinstance(current_model_of(taped.replica), TapedModel)
    runner = runner_of(called.replica)
    runner.use_model(whole_model_of(called.replica))
    return [taped, called]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["qwen3-tied", "qwen2-windows", "llama-biases-tied", "qwen2-moe", "gpt-oss", "deepseek-v3"]
)
def test_random_work_has_the_same_logits(checkpoint: Make, name: str, dtype: str) -> None:
    """Covers admissions, chunks, steps without a sample, pauses and releases."""
    rigs = rigs_of(checkpoint(name), dtype)
    choose = random.Random(3)
    free, pending = set(range(8)), {}
    for _ in range(80):
        rows = rigs[0].scheduler.rows
        released = [slot for slot in rows if choose.random() < 0.05 and slot not in pending]
        for rig in rigs:
            for slot in released:
                rig.scheduler.give_back(slot)
        free |= set(released)
        new = []
        if free and choose.random() < 0.4:
            slot = free.pop()
            tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 20))]
            new.append(New(slot, tokens, sampling=choose.choice(SAMPLINGS)))
            pending[slot] = len(tokens)
        counts = {slot: min(left, choose.randrange(1, 9)) for slot, left in pending.items()}
        pending = {slot: left - counts[slot] for slot, left in pending.items() if left > counts[slot]}
        for rig in rigs:
            rig.logits.clear()
        mine, theirs = (rig.step(new, counts, released) for rig in rigs)
        assert mine == theirs
        assert rigs[0].logits.keys() == rigs[1].logits.keys()
        for slot, logits in rigs[0].logits.items():
            assert torch.equal(torch.stack(logits), torch.stack(rigs[1].logits[slot]))
        assert rigs[0].last_result.logprobs == rigs[1].last_result.logprobs


@torch.inference_mode()
def test_unrecordable_models_are_called(checkpoint: Make) -> None:
    made = checkpoint("llama")
    for settings in ({"dtype": "float16", "attention_backend": "auto"}, {"attention_backend": "reference"}):
        rig = Rig(made.folder, **settings)
        assert not isinstance(current_model_of(rig.replica), TapedModel)
        rig.step([New(0, [1, 2, 3])], {0: 3})
        assert len(rig.tokens(0)) == 4


@torch.inference_mode()
def test_a_family_with_a_forward_pass_of_its_own_is_called(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass in another package may override the forward pass of a family that tapes record."""
    made, tokens = checkpoint("llama"), [1, 2, 3]
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *given: -CausalLM.forward(*given), raising=False)
    rig = Rig(made.folder)
    rig.step([New(0, tokens)], {0: 3})
    assert not isinstance(current_model_of(rig.replica), TapedModel)
    assert (rig.logits[0][0] + made.logits(tokens)[-1]).abs().max() < MAX_ERROR
