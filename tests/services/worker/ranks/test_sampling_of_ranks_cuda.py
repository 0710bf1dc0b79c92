"""Sampling of two ranks on GPUs, where plain sampling is part of CUDA graphs. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sampling_of_ranks import SAMPLINGS, gathered
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

Make = Callable[[str], Checkpoint]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_two_gpus_sample_as_one(checkpoint: Make, family: str, way: str) -> None:
    """All kinds at once, then those recorded in graphs: greedy and by temperature."""
    folder, settings = checkpoint(family).folder, {"device": "cuda", "record_logits": False, **WAYS[way]}
    whole = Rig(folder, **settings)
    plain = [SAMPLINGS[-1], type(SAMPLINGS[0])(temperature=0.8, seed=5), SAMPLINGS[-1]]
    with ranked(folder, **settings) as rig, gathered() as sent:
        for samplings in (SAMPLINGS, plain):
            slots = range(len(samplings))
            new = [New(slot, prompt(5, slot), sampling=sampling) for slot, sampling in enumerate(samplings)]
            for each in (whole, rig):
                each.step(new, dict.fromkeys(slots, 5))
                for _ in range(12):
                    each.step()
            assert [rig.tokens(slot) for slot in slots] == [whole.tokens(slot) for slot in slots]
            for each in (whole, rig):
                each.step(released=list(slots))
        assert not [x for x in sent if x.size(-1) >= VOCAB_SIZE // 2]
