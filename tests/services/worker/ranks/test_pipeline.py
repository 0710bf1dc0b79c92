"""A model divided into pipeline stages returns the whole model's output, with several steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.services.worker.layers.stages import Stage
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.columns import f32
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import FULL, Window
from quire.shared.pb.common.v1 import pooling_pb2, sampling_pb2
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import FAMILIES, Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import DIFFERENT, ranked
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]

SLOTS = (0, 2, 5)
STAGED = {"gemma3-tied"}  # windows in some layers, an embedding that is the head; other families: make sweep


def _marks(family: str) -> Any:
    return () if family in STAGED else pytest.mark.slow if family in DIFFERENT else pytest.mark.sweep


def by_turns(rig: Any, num_steps: int, num_stages: int) -> None:
    for step in range(num_steps):
        rig.last_result = rig.execute(rig.scheduler.plan(micro_batch=step % num_stages))
        rig.scheduler.take(rig.last_result)


def prefill(rig: Rig) -> None:
    rig.step([New(2, prompt(9, 2)), New(0, prompt(30, 1))], {0: 12, 2: 9})
    rig.step([New(5, prompt(17, 3))], {0: 12, 2: 0, 5: 17})
    rig.step(counts={0: 6, 2: 0, 5: 0})


@pytest.mark.parametrize("family", [pytest.param(name, marks=_marks(name)) for name in FAMILIES])
def test_two_stages_match_one(checkpoint: Make, family: str) -> None:
    made, whole = checkpoint(family), Rig(checkpoint(family).folder)
    prefill(whole)
    for _ in range(6):
        whole.step()
    with ranked(made.folder, size=1, stages=2) as rig:
        prefill(rig)
        by_turns(rig, 12, 2)
        for slot in SLOTS:
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR


@pytest.mark.slow
def test_two_stages_of_two_ranks_match_one(checkpoint: Make) -> None:
    made, whole = checkpoint("llama-biases-tied"), Rig(checkpoint("llama-biases-tied").folder)
    prefill(whole)
    for _ in range(6):
        whole.step()
    with ranked(made.folder, size=2, stages=2) as rig:
        prefill(rig)
        by_turns(rig, 12, 2)
        assert [rig.tokens(slot) for slot in SLOTS] == [whole.tokens(slot) for slot in SLOTS]


@pytest.mark.slow
def test_three_stages_have_steps_of_their_own_under_way(tmp_path: Path) -> None:
    """Each micro-batch is fed with its last tokens on the device; the host does not wait."""
    made = checkpoints.make("llama", tmp_path, num_hidden_layers=5)
    whole = Rig(made.folder)
    prompts = {slot: prompt(4 + slot, slot) for slot in range(6)}
    whole.step([New(slot, tokens) for slot, tokens in prompts.items()], {s: len(t) for s, t in prompts.items()})
    for _ in range(10):
        whole.step()
    with ranked(made.folder, size=1, stages=3) as rig:
        flights: deque[Any] = deque()
        for step in range(3 * 11):
            number = step % 3
            # A micro-batch has one sequence, then two: some tokens of a step are known, others are fed.
            new = [New(step, prompts[step])] if step in prompts else []
            plan = rig.scheduler.plan(new, {one.slot: len(one.tokens) for one in new}, micro_batch=number)
            flights.append(rig.launch(plan))
            assert [flight.launch.heads_launched for _, flight in flights][-3:] == [False] * min(3, len(flights))
            if len(flights) == 4:
                rig.scheduler.take(rig.finish(flights.popleft()))
        while flights:
            rig.scheduler.take(rig.finish(flights.popleft()))
        for slot, tokens in prompts.items():
            said = rig.tokens(slot)
            assert len(said) == len(tokens) + 11 - slot // 3
            assert said == whole.tokens(slot)[: len(said)]


@pytest.mark.slow
def test_a_slot_that_changes_hands_under_way_keeps_nothing_of_the_one_before(checkpoint: Make) -> None:
    """Penalties count a sequence's output; late tokens must not count for the next sequence."""
    made = checkpoint("llama")
    penalized = sampling_pb2.SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    alone = Rig(made.folder)
    alone.step([New(0, prompt(8, 4), sampling=penalized)], {0: 8})
    for _ in range(6):
        alone.step()
    with ranked(made.folder, size=1, stages=2) as rig:
        rig.step([New(0, prompt(9, 2), sampling=penalized)], {0: 9})
        late = rig.launch(rig.scheduler.plan())
        plan = rig.scheduler.plan([New(0, prompt(8, 4), sampling=penalized)], {0: 8}, released=[0])
        following = rig.launch(plan)
        assert late[1].launch.heads_launched
        rig.finish(late)
        rig.scheduler.sampling.pop(0)
        rig.scheduler.take(rig.finish(following))
        for _ in range(6):
            rig.step()
        assert rig.tokens(0) == alone.tokens(0)


@pytest.mark.slow
def test_vectors_and_prompt_logprobs_use_the_last_stage_output(checkpoint: Make) -> None:
    mean = pooling_pb2.PoolingParams(pooler=pooling_pb2.POOLER_MEAN)
    tells = sampling_pb2.SamplingParams(temperature=0.0, prompt_logprobs=2)

    def answers_of(rig: Rig) -> tuple[list[Any], list[Any], list[int]]:
        vectors, entries = [], []
        rig.step([New(0, prompt(20, 1), pooling=mean), New(2, prompt(14, 3), sampling=tells)], {0: 7, 2: 5})
        for counts in ({0: 7, 2: 5}, {0: 6, 2: 4}, {}):
            entries.append(f32(rig.last_result.prompt_logprobs.entries.logprobs))
            rig.step(counts=counts)
            vectors.append(f32(rig.last_result.pooled.values))
        return vectors, entries, [*rig.tokens(2)]

    expected = answers_of(Rig(checkpoint("llama").folder))
    with ranked(checkpoint("llama").folder, size=1, stages=2) as rig:
        found = answers_of(rig)
        # Every stage refuses what is wrong, so that all know which hidden states are read.
        wrong = pooling_pb2.PoolingParams(classify=True)
        rig.step([New(1, prompt(9, 1), pooling=wrong), New(3, prompt(9, 2))], {1: 9, 3: 9})
        assert [failure.slot for failure in rig.last_result.failures] == [1]
        assert len(rig.tokens(3)) == 10
    assert found[2] == expected[2]
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert sum(map(len, mine)) == sum(map(len, theirs)) > 0
        np.testing.assert_allclose(np.concatenate(mine), np.concatenate(theirs), atol=1e-5)


def test_stages_have_layers_that_follow_one_another_and_the_first_one_fewer_for_its_head() -> None:
    def shares(num_layers: int, size: int, head: float) -> list[int]:
        parts = [Stage(number, size).layers(num_layers, head) for number in range(size)]
        assert [layer for part in parts for layer in part] == list(range(num_layers))
        return [len(part) for part in parts]

    assert shares(32, 2, 0.0) == [16, 16]
    assert shares(32, 2, 2.4) == [15, 17]
    assert shares(32, 4, 2.4) == [6, 9, 8, 9]
    assert shares(2, 2, 50.0) == [1, 1]
    assert shares(5, 3, 50.0) == [1, 1, 3]
    assert shares(32, 1, 2.4) == [32]
    with pytest.raises(InvalidArgument, match="pipeline_parallel_size: 3 stages need a layer each, the model has 2"):
        shares(2, 3, 0.0)


def test_a_stage_keeps_pages_for_its_own_layers_in_all_groups() -> None:
    layout = KVLayout.of([Window(8), Window(8), Window(8), FULL] * 2, max_model_len=100, num_stages=2)
    first, last = layout.for_layers(range(3)), layout.for_layers(range(3, 8))
    assert [group.spec for group in first.groups] == [group.spec for group in layout.groups]
    assert [len(first.places), len(last.places)] == [3, 5]
    assert [first.layers_per_page, last.layers_per_page, layout.layers_per_page] == [2, 2, 3]
    assert layout.for_layers(range(8)) == layout


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, "speculative_config: not with"),
        ({"batch_invariant": True}, "batch_invariant: not with pipeline_parallel_size 2"),
        ({"model_impl": "transformers"}, "model_impl: not with pipeline_parallel_size 2"),
        ({"max_num_seqs": 1}, "max_num_seqs: not with pipeline_parallel_size 2: it must be at least 2"),
    ],
)
def test_settings_unsupported_by_stages_are_refused_by_name(
    checkpoint: Make, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Rig(checkpoint("llama").folder, placement=RankPlacement(0, 2, stages=2), pipeline_parallel_size=2, **settings)
