"""Context-parallel ranks return one rank's output: two processes on the CPU, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.services.worker.building.build import build_replica
from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import SINGLE_RANK, RankPlacement
from quire.shared.columns import f32
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import pooling_pb2, sampling_pb2
from quire.shared.settings import WorkerSettings
from tests.services.worker.checkpoints import FAMILIES, Checkpoint
from tests.services.worker.lora import peft_folders
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import DIFFERENT, ranked
from tests.services.worker.replica_internals import whole_model_of
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]

SLOTS = (0, 2, 5)
ROOM: dict[str, Any] = {"num_blocks": 512}
MEAN = pooling_pb2.PoolingParams(pooler=pooling_pb2.POOLER_MEAN)
SHARED = {"gemma3-tied"}


def _marks(family: str) -> Any:
    return () if family in SHARED else pytest.mark.slow if family in DIFFERENT else pytest.mark.sweep


def long_steps(rig: Rig) -> None:
    """Chunks that are divided, alone, together and with decodes; others that are too short."""
    rig.step([New(2, prompt(90, 2)), New(0, prompt(170, 1))], {0: 80, 2: 60})
    rig.step([New(5, prompt(9, 3))], {0: 0, 2: 30, 5: 9})
    rig.step(counts={0: 90})
    for _ in range(6):
        rig.step()


@pytest.mark.parametrize("family", [pytest.param(name, marks=_marks(name)) for name in FAMILIES])
def test_two_ranks_match_one(checkpoint: Make, family: str) -> None:
    made, whole = checkpoint(family), Rig(checkpoint(family).folder, **ROOM)
    long_steps(whole)
    with ranked(made.folder, size=1, contexts=2, **ROOM) as rig:
        long_steps(rig)
        for slot in SLOTS:
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR


def coming_and_going(rig: Rig) -> None:
    """A prompt with a cached prefix, a preempted sequence that resumes with its output, a copied block; decodes in all
    steps."""
    rig.step([New(0, prompt(120, 1)), New(1, prompt(70, 2))], {0: 120, 1: 70})
    for _ in range(3):
        rig.step()
    shared = [*rig.tokens(0)[:101], *prompt(60, 3)]
    whole, partial = rig.blocks(0)[:25], rig.blocks(0)[25]
    new = New(2, shared, cached_blocks=whole, copied_block=partial, num_cached=101)
    rig.step([new], {0: 1, 1: 1, 2: 60})
    said = rig.tokens(1)
    rig.scheduler.give_back(1)
    rig.step(counts={0: 1, 2: 1}, released=[1])
    rig.step([New(3, said, num_prompt=70)], {0: 1, 2: 1, 3: len(said)})
    for _ in range(3):
        rig.step()


@pytest.mark.slow
def test_cached_prefixes_and_resumed_prompts(checkpoint: Make) -> None:
    folder = checkpoint("llama").folder
    whole = Rig(folder, **ROOM)
    coming_and_going(whole)
    with ranked(folder, size=1, contexts=2, **ROOM) as rig:
        coming_and_going(rig)
        assert [rig.tokens(slot) for slot in (0, 2, 3)] == [whole.tokens(slot) for slot in (0, 2, 3)]


def contrary(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    """Builds a rank that would choose the worst tokens."""
    part = build_part(settings, placement)
    model = whole_model_of(part.replica)
    logits = model.logits
    model.logits = lambda hidden, *adapted: -logits(hidden, *adapted)
    return part


@pytest.mark.slow
def test_all_ranks_continue_with_rank_0_tokens(checkpoint: Make) -> None:
    """A rank with other choices would compute a different text, visible in its part of a later step."""

    def run(rig: Rig) -> None:
        rig.step([New(0, prompt(70, 1)), New(2, prompt(20, 2)), New(5, prompt(9, 3))], {0: 70, 2: 20, 5: 9})
        for _ in range(8):
            rig.step()
        rig.step([New(1, prompt(80, 4))], {0: 1, 1: 80, 2: 1, 5: 1})
        rig.step()

    folder = checkpoint("llama").folder
    whole = Rig(folder, **ROOM)
    run(whole)
    with ranked(folder, size=1, contexts=2, build=contrary, **ROOM) as rig:
        run(rig)
        assert [rig.tokens(slot) for slot in (0, 1, 2, 5)] == [whole.tokens(slot) for slot in (0, 1, 2, 5)]


@pytest.mark.slow
def test_vectors_and_prompt_logprobs_are_gathered_from_all_ranks(checkpoint: Make) -> None:
    def vectors_and_scores(rig: Rig) -> tuple[list[float], list[float]]:
        vectors, entries = [], []
        tells = sampling_pb2.SamplingParams(temperature=0.0, prompt_logprobs=2)
        rig.step([New(0, prompt(150, 1), pooling=MEAN), New(2, prompt(90, 3), sampling=tells)], {0: 70, 2: 50})
        entries += f32(rig.last_result.prompt_logprobs.entries.logprobs).tolist()
        rig.step(counts={0: 80, 2: 40})
        entries += f32(rig.last_result.prompt_logprobs.entries.logprobs).tolist()
        vectors += f32(rig.last_result.pooled.values).tolist()
        return vectors, entries

    folder = checkpoint("llama").folder
    expected = vectors_and_scores(Rig(folder, **ROOM))
    with ranked(folder, size=1, contexts=2, **ROOM) as rig:
        found = vectors_and_scores(rig)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) > 0
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.slow
def test_rows_with_adapters_have_them_on_every_rank(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama-biases-tied")
    merged = peft_folders.save(made, tmp_path / "a", seed=1)
    with ranked(made.folder, size=1, contexts=2, lora={"a": str(merged.folder)}, **ROOM) as rig:
        rig.step([New(0, prompt(90, 1), adapter="a"), New(1, prompt(40, 2))], {0: 90, 1: 40})
        for _ in range(2):
            rig.step()
        rig.step([New(2, prompt(80, 3))], {0: 1, 1: 1, 2: 80})
        assert error(rig, merged, 0) < MAX_ERROR
        assert error(rig, made, 1) < MAX_ERROR
        assert error(rig, made, 2) < MAX_ERROR


@pytest.mark.slow
def test_three_ranks_and_two_of_two_match_one(checkpoint: Make) -> None:
    """The latter also shards tensors."""
    made = checkpoint("llama-biases-tied")
    whole = Rig(made.folder, **ROOM)
    long_steps(whole)
    for size, contexts in ((1, 3), (2, 2)):
        with ranked(made.folder, size=size, contexts=contexts, **ROOM) as rig:
            long_steps(rig)
            assert [rig.tokens(slot) for slot in SLOTS] == [whole.tokens(slot) for slot in SLOTS]


@pytest.mark.slow
def test_the_code_of_transformers_is_shared_out_as_well(checkpoint: Make) -> None:
    made, settings = checkpoint("llama"), {**ROOM, "model_impl": "transformers"}
    whole = Rig(made.folder, **settings)
    long_steps(whole)
    with ranked(made.folder, size=1, contexts=2, **settings) as rig:
        long_steps(rig)
        assert [rig.tokens(slot) for slot in SLOTS] == [whole.tokens(slot) for slot in SLOTS]


@pytest.mark.parametrize(
    ("placement", "settings", "text"),
    [
        (
            RankPlacement(0, 4, stages=2, contexts=2),
            {"pipeline_parallel_size": 2},
            "context_parallel_size: not with pipeline_parallel_size 2",
        ),
        (RankPlacement(0, 2, contexts=2), {"expert_parallel": True}, "expert_parallel: it requires more than one rank"),
        (SINGLE_RANK, {"lora_folders": ["/"]}, "lora_folders is not supported with context_parallel_size 2"),
        (SINGLE_RANK, {"kv_offloading_size": 1.0}, "kv_offloading_size: .*not supported with context_parallel_size 2"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    checkpoint: Make, placement: RankPlacement, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        build_replica(
            Rig.settings(checkpoint("llama").folder, context_parallel_size=2, **settings), placement=placement
        )
