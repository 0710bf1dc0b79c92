"""Layers whose all-reduces are fused with the following norm return one rank's output: two processes, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.services.worker.ranks.collectives.group_collectives import GroupCollectives
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks import normed_sums_build
from tests.services.worker.ranks.test_expert_parallel import one_process
from tests.services.worker.ranks.test_pipeline import by_turns, prefill
from tests.services.worker.ranks.test_sharding import RankedRig, mixed_steps, ranked
from tests.services.worker.replica_internals import whole_model_of
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
SLOTS = (0, 2, 5)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each sum that rank 0 normalized."""
    for name in ("fuses_rms_norm", "all_reduce_rms_norm"):
        monkeypatch.setattr(GroupCollectives, name, getattr(GroupCollectives, name))  # is as it was behind the test
    normed_sums_build.patch()
    normed_sums_build.normed.clear()
    return normed_sums_build.normed


@contextmanager
def norming(folder: Path, **settings: Any) -> Iterator[RankedRig]:
    with ranked(folder, build=normed_sums_build.build, **settings) as rig:
        yield rig


def slow(family: str) -> Any:
    return pytest.param(family, marks=pytest.mark.slow)


# Biases and a tied table, experts with shared ones, latent attention, factors, norms with an offset; four norms a layer
# and one for both parts, which leave nothing to them.
@pytest.mark.parametrize(
    "family",
    [
        "llama-biases-tied",
        "qwen2-moe",
        "deepseek-v3",
        *map(slow, ("granite", "gemma-tied", "llama4", "gemma2", "cohere")),
    ],
)
def test_ranks_match_one(checkpoint: Make, family: str, sums: list[int]) -> None:
    made, whole = checkpoint(family), Rig(checkpoint(family).folder)
    mixed_steps(whole)
    with norming(made.folder) as rig:
        mixed_steps(rig)
        for slot in SLOTS:
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR
    assert bool(sums) == (family not in ("gemma2", "cohere"))


def test_behind_attention_and_behind_the_rest(checkpoint: Make, sums: list[int]) -> None:
    """In each layer, and at the final norm."""
    made = checkpoint("llama")
    with norming(made.folder) as rig:
        rig.step([New(0, prompt(9, 1))], {0: 9})
        sums.clear()
        rig.step()
        assert len(sums) == 2 * len(whole_model_of(rig.replica).layers)


def test_what_a_layer_reads_is_kept_whole(checkpoint: Make, sums: list[int]) -> None:
    """Hidden states kept for a drafter."""
    made = checkpoint("llama")
    with ranked(made.folder, build=normed_sums_build.build_keeping) as rig:
        whole, found = (states_of(each) for each in (one_process(made), rig))
    assert sums
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


def states_of(rig: Rig) -> Tensor:
    """Hidden states [num_samples, 4 * hidden_size] of mixed steps."""
    model, found = whole_model_of(rig.replica), []
    model.keep_states(normed_sums_build.KEPT)
    forward = model.forward

    def recorded(*of_step: Any) -> Tensor:
        found.append(forward(*of_step))
        return found[-1]

    model.forward = recorded
    mixed_steps(rig)
    states = torch.cat(found)
    assert states.size(1) == 4 * model.config.hidden_size
    return states


@pytest.mark.slow
def test_stages_hand_on_whole_sums(checkpoint: Make, sums: list[int]) -> None:
    made, whole = checkpoint("llama"), Rig(checkpoint("llama").folder)
    prefill(whole)
    for _ in range(6):
        whole.step()
    with norming(made.folder, stages=2) as rig:
        prefill(rig)
        by_turns(rig, 12, 2)
        assert [rig.tokens(slot) for slot in SLOTS] == [whole.tokens(slot) for slot in SLOTS]
    assert sums
