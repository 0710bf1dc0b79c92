"""Outputs of steps besides tokens, on two ranks: vectors, prompt log-probabilities, beams, all kinds of sampling."""

from __future__ import annotations

from collections.abc import Callable

from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.heads.test_pooling import close, run_beside
from tests.services.worker.heads.test_prompt_logprobs import asking, found
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.rig import Rig
from tests.services.worker.step.test_beam_moves import Search
from tests.services.worker.test_cuda import SAMPLINGS

Make = Callable[[str], Checkpoint]


def test_ranks_pool_and_score_prompts_as_one_does(checkpoint: Make) -> None:
    folder = checkpoint("llama").folder
    whole = Rig(folder)
    with ranked(folder) as rig:
        vectors = [run_beside(each, with_pooling=True) for each in (whole, rig)]
        assert all(close(vectors[1][slot], vector) for slot, vector in vectors[0].items())
        for each in (whole, rig):
            each.step(released=list(each.scheduler.rows))
            each.step([New(0, prompt(9), sampling=asking(prompt_logprobs=3))], {0: 9})
        for (ids, values, rank), (own_ids, own_values, own_rank) in zip(found(whole), found(rig), strict=True):
            assert (ids, rank) == (own_ids, own_rank)
            assert max(abs(a - b) for a, b in zip(values, own_values, strict=True)) < 1e-4


def test_ranks_search_and_draw_as_one_does(checkpoint: Make) -> None:
    folder = checkpoint("llama").folder
    whole = Rig(folder)
    with ranked(folder) as rig:
        for each in (whole, rig):
            new = [New(slot, prompt(7, slot), sampling=sampling) for slot, sampling in enumerate(SAMPLINGS)]
            each.step(new, dict.fromkeys(range(len(SAMPLINGS)), 7))
            for _ in range(8):
                each.step()
        assert [rig.tokens(slot) for slot in range(len(SAMPLINGS))] == [
            whole.tokens(slot) for slot in range(len(SAMPLINGS))
        ]
        for each in (whole, rig):
            each.step(released=list(range(len(SAMPLINGS))))
        searches = [Search(each, prompt(10)) for each in (whole, rig)]
        for search in searches:
            search.go_on([(0, 0), (1, 0), (2, 2)])
        assert rig.tokens(0) == whole.tokens(0)
        assert rig.tokens(1) == whole.tokens(1)
