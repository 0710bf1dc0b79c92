"""Pooled vectors equal those of transformers' hidden states, however prompts are split into steps and batched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import finish_pb2, sampling_pb2
from quire.shared.pb.common.v1.pooling_pb2 import (
    POOLER_ALL,
    POOLER_CLS,
    POOLER_LAST,
    POOLER_MEAN,
    POOLER_STEP,
    PoolingParams,
)
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.graphs.test_chunk_graphs import SHAPES, use_chunk_graphs
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import current_model_of, runner_of
from tests.services.worker.rig import Rig
from tests.shared.models.test_sentence_transformers import DENSE, MEAN, TRANSFORMER, write

Make = Callable[[str], Checkpoint]
Vector = npt.NDArray[np.float32]
MAX_ERROR = 2e-5


def pooled(rig: Rig) -> dict[int, Vector]:
    """Returns the vectors of the last result, by slot."""
    found = rig.last_result.pooled
    sizes = columns.u32(found.sizes)
    vectors = np.split(columns.f32(found.values), np.cumsum(sizes)[:-1])
    return dict(zip(columns.u32(found.slots).tolist(), vectors, strict=bool(len(sizes))))


def expected(made: Checkpoint, tokens: list[int], params: PoolingParams) -> Vector:
    with torch.inference_mode():
        hidden = made.model.model(torch.tensor([tokens])).last_hidden_state[0].float()
    vector = {POOLER_MEAN: hidden.mean(0), POOLER_CLS: hidden[0]}.get(params.pooler, hidden[-1])
    vector = vector[: params.dimensions or len(vector)]
    wanted = vector if params.HasField("normalize") and not params.normalize else vector / vector.norm()
    found: Vector = wanted.numpy()
    return found


def close(found: Vector, wanted: Vector) -> bool:
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) < MAX_ERROR


ALL = [
    PoolingParams(),
    PoolingParams(pooler=POOLER_LAST, normalize=False),
    PoolingParams(pooler=POOLER_MEAN),
    PoolingParams(pooler=POOLER_CLS),
    PoolingParams(pooler=POOLER_MEAN, dimensions=7),
]


both_ways = pytest.mark.parametrize("backend", ["reference", "auto"])  # kernel by kernel, and recorded on a tape


@both_ways
@pytest.mark.parametrize("chunks", [[23], [1, 9, 12, 1], [22, 1]])
def test_vectors_are_those_of_the_hidden_states(checkpoint: Make, backend: str, chunks: list[int]) -> None:
    """Carries a prompt's state from step to step."""
    made = checkpoint("llama" if backend == "auto" else "qwen3-tied")
    rig = Rig(made.folder, max_num_batched_tokens=256, attention_backend=backend)
    prompts = [prompt(23, seed=slot) for slot in range(len(ALL))]
    new = [New(slot, prompts[slot], pooling=ALL[slot]) for slot in range(len(ALL))]
    for i, count in enumerate(chunks):
        assert i == 0 or not rig.last_result.HasField("pooled")
        assert rig.step(new if i == 0 else [], dict.fromkeys(range(len(ALL)), count)) == {}
    found = pooled(rig)
    assert sorted(found) == list(range(len(ALL)))
    for slot, params in enumerate(ALL):
        assert close(found[slot], expected(made, prompts[slot], params)), params


def run_beside(rig: Rig, *, with_pooling: bool, num_steps: int = 8) -> dict[int, Vector]:
    """Runs slots 0 and 3 that generate, and 1, 2 and 4 that are pooled in chunks."""
    sampling = sampling_pb2.SamplingParams(temperature=0.9, seed=5, logprobs=2)
    rig.step([New(0, prompt(7, seed=1)), New(3, prompt(11, seed=2), sampling=sampling)], {0: 7, 3: 11})
    found: dict[int, Vector] = {}
    for step in range(num_steps):
        new, counts = [], {}
        if with_pooling and step == 1:
            new = [New(1, prompt(13, seed=3), pooling=ALL[2]), New(2, prompt(6, seed=4), pooling=ALL[0])]
            counts = {1: 4, 2: 6}
        elif with_pooling and step == 2:
            new = [New(4, prompt(9, seed=6), pooling=ALL[3])]
            counts = {1: 8, 4: 9}
        elif with_pooling and step == 4:
            counts = {1: 1}  # slots that sample nothing advance only if the plan names them
        rig.step(new, counts)
        found |= pooled(rig)
    return found


@both_ways
def test_a_mixed_step_gives_vectors_and_leaves_tokens_as_they_were(checkpoint: Make, backend: str) -> None:
    """Runs kernel by kernel and, with the compiled kernels, as a tape."""
    made = checkpoint("qwen3-tied")
    rigs = [Rig(made.folder, attention_backend=backend, record_logits=False) for _ in range(2)]
    vectors = run_beside(rigs[0], with_pooling=True)
    assert run_beside(rigs[1], with_pooling=False) == {}
    assert [rigs[0].tokens(slot) for slot in (0, 3)] == [rigs[1].tokens(slot) for slot in (0, 3)]
    assert len(rigs[0].tokens(0)) == 7 + 9
    assert sorted(vectors) == [1, 2, 4]
    assert close(vectors[1], expected(made, prompt(13, seed=3), ALL[2]))
    assert close(vectors[2], expected(made, prompt(6, seed=4), ALL[0]))
    assert close(vectors[4], expected(made, prompt(9, seed=6), ALL[3]))


@torch.inference_mode()
@pytest.mark.parametrize("hidden", [True, False])
def test_graphs_run_only_steps_whose_heads_they_support(checkpoint: Make, hidden: bool) -> None:
    """Graphs that keep hidden states support all heads, others support sampling only."""
    made = checkpoint("qwen3-tied")
    rigs = [Rig(made.folder, record_logits=False) for _ in range(2)]
    seen = use_chunk_graphs(rigs[0].replica, SHAPES, features=hidden)
    vectors = run_beside(rigs[0], with_pooling=True)
    calm = run_beside(rigs[1], with_pooling=True)
    assert rigs[0].tokens(3) == rigs[1].tokens(3)
    assert sorted(vectors) == sorted(calm) == [1, 2, 4]
    assert all(close(vectors[slot], calm[slot]) for slot in calm)
    assert seen.num_forwards == (7 if hidden else 5)  # two of the nine steps are too large for any graph


def test_a_prompt_whose_blocks_are_cached_gives_the_same_vector(checkpoint: Make) -> None:
    made, tokens = checkpoint("llama"), prompt(12)
    rig = Rig(made.folder)
    rig.step([New(0, tokens)], {0: 12})
    blocks = rig.blocks(0)[:3]
    rig.step([New(1, tokens, cached_blocks=blocks, pooling=ALL[0])], {1: 1})
    assert close(pooled(rig)[1], expected(made, tokens, ALL[0]))


def test_a_reused_slot_starts_with_clean_state(checkpoint: Make) -> None:
    """No partial sum survives, and a slot that was pooled can sample for its next sequence."""
    made = checkpoint("llama")
    rig = Rig(made.folder)
    rig.step([New(0, prompt(12), pooling=ALL[2])], {0: 5})
    tokens = prompt(8, seed=9)
    rig.step([New(0, tokens, pooling=ALL[2])], {0: 8}, released=[0])
    assert close(pooled(rig)[0], expected(made, tokens, ALL[2]))
    assert list(rig.step([New(0, tokens)], {0: 8}, released=[0])) == [0]
    rig.end_epoch()
    assert list(rig.step([New(0, tokens)], {0: 8})) == [0]


def test_only_generating_sequences_have_drafts(checkpoint: Make) -> None:
    made = checkpoint("qwen3-tied")
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive_length": false}'
    rig = Rig(made.folder, record_logits=False, speculative_config=config)
    plan = rig.scheduler.plan([New(0, [5, 6] * 4), New(1, [7, 8] * 4, pooling=ALL[2])], {0: 8, 1: 7})
    plan.num_draft_tokens, plan.new_block_slots = 3, columns.u32_bytes([0, 0, 1, 1])
    rig.execute(plan)
    more = rig.scheduler.plan(counts={1: 1})
    ids = columns.u32(more.new_block_ids).tolist()
    more.new_block_slots = columns.u32_bytes([0] * len(ids))
    rig.last_result = rig.execute(more)
    assert close(pooled(rig)[1], expected(made, [7, 8] * 4, ALL[2]))
    assert len(columns.u32(rig.last_result.draft_counts)) <= 1


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (PoolingParams(dimensions=49), "pooling.dimensions"),
        (PoolingParams(pooler=9), "pooling.pooler"),  # type: ignore[arg-type]
    ],
)
def test_unsupported_pooling_fails_its_sequence_alone(checkpoint: Make, params: PoolingParams, field: str) -> None:
    rig = Rig(checkpoint("llama").folder)
    new = [New(0, prompt(6), pooling=params), New(1, prompt(5), pooling=ALL[0]), New(2, prompt(4))]
    assert list(rig.step(new, {0: 5, 1: 5, 2: 4})) == [2]
    assert not rig.last_result.failures
    assert list(pooled(rig)) == [1]
    rig.step(counts={0: 1})
    (failure,) = rig.last_result.failures
    assert failure.slot == 0
    assert failure.error.field == field
    assert field in failure.error.message


def test_cached_tokens_cannot_be_averaged(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, prompt(12))], {0: 12})
    rig.step([New(1, prompt(12), cached_blocks=rig.blocks(0)[:2], pooling=ALL[2])], {1: 4})
    (failure,) = rig.last_result.failures
    assert "8 of its tokens are cached" in failure.error.message


@pytest.mark.parametrize("samples_nothing", [True, False])
def test_params_must_match_the_scheduler_on_sampling(checkpoint: Make, samples_nothing: bool) -> None:
    """Otherwise the scheduler's and the worker's slot tables would diverge."""
    rig = Rig(checkpoint("llama").folder)
    new = New(0, prompt(6), pooling=None if samples_nothing else ALL[0])
    plan = rig.scheduler.plan([new], {0: 6})
    plan.admitted[0].samples_nothing = samples_nothing
    result = rig.execute(plan)
    assert result.failures[0].error.code == finish_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert result.failures[0].error.message.startswith("params")
    assert len(columns.i32(result.token_ids)) == int(not samples_nothing)


def test_a_pooled_slot_has_nothing_left_to_compute(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, prompt(6), pooling=ALL[0])], {0: 6})
    plan = rig.scheduler.plan()
    plan.counted_slots, plan.token_counts = columns.u32_bytes([0]), columns.u32_bytes([1])
    with pytest.raises(PlanViolation):
        rig.execute(plan)


def test_a_vector_with_nan_fails_its_sequence(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder)
    runner: Any = runner_of(rig.replica)
    forward = current_model_of(rig.replica).forward

    class Broken:
        logits = staticmethod(current_model_of(rig.replica).logits)

        @staticmethod
        def forward(*arguments: Any) -> torch.Tensor:
            hidden: torch.Tensor = forward(*arguments)
            hidden[0, 0] = torch.nan
            return hidden

    runner.use_model(Broken())
    rig.step([New(0, prompt(6), pooling=ALL[2]), New(1, prompt(5), pooling=ALL[2])], {0: 6, 1: 5})
    (failure,) = rig.last_result.failures
    assert failure.slot == 0
    assert failure.error.code == finish_pb2.ERROR_CODE_INTERNAL


@both_ways
@pytest.mark.parametrize("chunks", [[17], [5, 1, 11]])
def test_single_tokens_have_a_vector_each(checkpoint: Make, chunks: list[int], backend: str) -> None:
    """Covers all tokens, or those with one id, in chunked and shared steps, kernel by kernel and as a tape."""
    made, tag = checkpoint("llama"), 7
    tokens = prompt(17)
    tokens[3] = tokens[4] = tokens[12] = tag
    asked = [
        PoolingParams(pooler=POOLER_ALL),
        PoolingParams(pooler=POOLER_ALL, dimensions=5, normalize=False),
        PoolingParams(pooler=POOLER_STEP, step_tag_id=tag),
        PoolingParams(),
    ]
    rig = Rig(made.folder, max_num_batched_tokens=256, attention_backend=backend, record_logits=False)
    new = [New(slot, tokens, pooling=params) for slot, params in enumerate(asked)]
    for i, count in enumerate(chunks):
        rig.step(new if i == 0 else [], dict.fromkeys(range(4), count))
    with torch.inference_mode():
        states = made.model.model(torch.tensor([tokens])).last_hidden_state[0].float()
    unit = torch.nn.functional.normalize(states, dim=1)
    found = pooled(rig)
    tags = [place for place, token in enumerate(tokens) if token == tag]
    for slot, wanted in enumerate((unit, states[:, :5], unit[tags], unit[-1:])):
        assert close(found[slot], wanted.flatten().numpy()), slot


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (PoolingParams(pooler=POOLER_STEP), "step_tag_id: required"),
        (PoolingParams(pooler=POOLER_STEP, step_tag_id=VOCAB_SIZE - 1), "does not occur in the sequence"),
    ],
)
def test_a_missing_step_tag_is_refused(checkpoint: Make, params: PoolingParams, named: str) -> None:
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, [1, 2, 3], pooling=params)], {0: 3})
    (failure,) = rig.last_result.failures
    assert named in failure.error.message


def test_results_over_the_size_limit_are_refused(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.services.worker.heads.pooling.MAX_POOLED_ELEMENTS", 100)
    rig = Rig(checkpoint("llama").folder)
    asked = [PoolingParams(pooler=POOLER_ALL), PoolingParams(pooler=POOLER_ALL, dimensions=20)]
    rig.step([New(slot, [1, 2, 3], pooling=one) for slot, one in enumerate(asked)], {0: 3, 1: 3})
    assert [failure.slot for failure in rig.last_result.failures] == [0]
    assert len(pooled(rig)[1]) == 60


def test_a_sentence_transformers_folder_defines_a_decoders_pooling(checkpoint: Make, tmp_path: Path) -> None:
    """Uses the mean without normalisation unless a request asks for something else."""
    made, tokens = checkpoint("llama"), prompt(9)
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    rig = Rig(write(tmp_path, TRANSFORMER, MEAN))
    asked = [PoolingParams(), PoolingParams(normalize=True), PoolingParams(pooler=POOLER_LAST, normalize=True)]
    rig.step([New(slot, tokens, pooling=one) for slot, one in enumerate(asked)], dict.fromkeys(range(3), 9))
    found = pooled(rig)
    for slot, pooler in enumerate((POOLER_MEAN, POOLER_MEAN, POOLER_LAST)):
        wanted = PoolingParams(pooler=pooler, normalize=asked[slot].normalize)
        assert close(found[slot], expected(made, tokens, wanted)), slot


@pytest.mark.parametrize("modules", [[("Pooling", {"pooling_mode_max_tokens": True})], [MEAN, ("Dense", DENSE)]])
def test_modes_that_need_whole_prompts_are_refused(checkpoint: Make, tmp_path: Path, modules: list[Any]) -> None:
    shutil.copytree(checkpoint("llama").folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(InvalidArgument, match="dense layers; supported for decoders: one of last, mean, cls"):
        Rig(write(tmp_path, TRANSFORMER, *modules))
