"""Ranks that share out the tokens of long steps say what one rank says: two processes on the CPU, by gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.services.worker.checkpoints import FAMILIES, Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import DIFFERENT, ranked
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]

SLOTS = (0, 2, 5)
ROOM: dict[str, Any] = {"num_blocks": 512}
SHARED = {"gemma3-tied"}


def _marks(family: str) -> Any:
    return () if family in SHARED else pytest.mark.slow if family in DIFFERENT else pytest.mark.sweep


def long_steps(rig: Rig) -> None:
    """Chunks that are shared out, alone, with each other and beside decodes; others that are too short for it."""
    rig.step([New(2, prompt(90, 2)), New(0, prompt(170, 1))], {0: 80, 2: 60})
    rig.step([New(5, prompt(9, 3))], {0: 0, 2: 30, 5: 9})
    rig.step(counts={0: 90})
    for _ in range(6):
        rig.step()


@pytest.mark.parametrize("family", [pytest.param(name, marks=_marks(name)) for name in FAMILIES])
def test_two_ranks_say_what_one_does(checkpoint: Make, family: str) -> None:
    made, whole = checkpoint(family), Rig(checkpoint(family).folder, **ROOM)
    long_steps(whole)
    with ranked(made.folder, size=1, contexts=2, **ROOM) as rig:
        long_steps(rig)
        for slot in SLOTS:
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR
