"""A worker warmed up with drafts generates the same as one that was not warmed up."""

from __future__ import annotations

import pytest
import torch

from quire.services.worker.building import draft_warmup
from quire.services.worker.replica.replica import Replica
from quire.services.worker.spec_decode.speculation import Speculation
from tests.observing import ObservedCall, calls_of
from tests.services.worker.replica_internals import runner_of
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions


def warmed_up(method: str) -> Replica:
    replica = build(METHODS[method])
    assert isinstance(replica.speculation, Speculation)
    with torch.inference_mode():
        draft_warmup.warm_up_drafts(replica, replica.speculation)
    return replica


def drafts_of_steps(replica: Replica) -> list[list[int]]:
    """Returns the drafts per sequence, by step of the warm-up."""
    counts: list[list[int]] = []

    def record(call: ObservedCall) -> None:
        drafts = call.arguments["inputs"].drafts
        counts.append([] if drafts is None else drafts.counts.tolist())

    assert isinstance(replica.speculation, Speculation)
    with calls_of(type(runner_of(replica)).launch, on_call=record), torch.inference_mode():
        draft_warmup.warm_up_drafts(replica, replica.speculation)
    return counts


def said(replica: Replica) -> tuple[list[list[int]], int]:
    """Returns the outputs and the number of accepted drafts."""
    pair = Pair(replica)
    answers = [pair.ask(prompt, 24, temperature=0.8, seed=7) for prompt in questions()]
    pair.run()
    return [answer.tokens for answer in answers], pair.core.speculation.counts.accepted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_the_warm_up_leaves_no_trace(method: str) -> None:
    replica = warmed_up(method)
    assert len(replica.end_epoch().block_ids) == 0
    (tokens, accepted), (expected, usual) = said(replica), said(build(METHODS[method]))
    assert tokens == expected
    assert accepted == usual > 0


def test_every_size_has_steps_with_drafts() -> None:
    counts = drafts_of_steps(build(METHODS["ngram"]))
    assert [len(each) for each in counts[2::3]] == list(draft_warmup.SIZES)


def test_a_worker_too_small_for_a_warm_up_skips_it() -> None:
    replica = build(METHODS["ngram"], num_blocks=3, max_num_seqs=1)
    assert isinstance(replica.speculation, Speculation)
    with torch.inference_mode():
        draft_warmup.warm_up_drafts(replica, replica.speculation)
    assert len(replica.end_epoch().block_ids) == 0
