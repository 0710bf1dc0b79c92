"""Recurrent layers whose heads, or which themselves, are shared out among ranks: schedulers get the text of one rank,
however prompts are cut, found in the cache, and preempted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kv_groups.test_windows import prompt
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.ranks.ranked_pair import ranked_pair
from tests.spec_decode.pair import Pair, build

SIZES = {"block_size": 16, "max_num_batched_tokens": 20, "num_blocks": 300}


@dataclass(frozen=True)
class Case:
    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "qwen3-next": Case("qwen3-next"),
    "qwen3-next-tied": Case("qwen3-next-tied"),
    "qwen3-next-one-key-head": Case("qwen3-next", {"linear_num_key_heads": 1}),
    "qwen3-next-keys-of-both": Case("qwen3-next", {"linear_num_key_heads": 3}),
    "qwen3-next-ends-recurrent": Case("qwen3-next-ends-recurrent"),
    "granite-hybrid-one-group": Case("granite-hybrid", {"mamba_n_groups": 1}),
    "granite-hybrid-two-groups": Case("granite-hybrid", {"mamba_n_groups": 2}),
    "granite-hybrid-three-groups": Case("granite-hybrid", {"mamba_n_groups": 3}),
    "granite-hybrid-experts": Case("granite-hybrid-experts", {"mamba_n_groups": 1}),
    "falcon-h1": Case("falcon-h1"),
    "falcon-h1-norms": Case("falcon-h1-norms"),
    "falcon-h1-norms-one-group": Case("falcon-h1-norms", {"mamba_n_groups": 1}),
    "falcon-h1-norms-behind-gates": Case("falcon-h1-norms", {"mamba_n_groups": 3, "mamba_norm_before_gate": False}),
}
Make = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """By the name of a case."""
    found: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in found:
            with pytest.MonkeyPatch.context() as patch:  # for weights of as many groups, whatever transformers does
                patch.setattr(checkpoints, "_norms_by_group", lambda: True)
                case = CASES[name]
                found[name] = checkpoints.make(case.family, tmp_path_factory.mktemp(name), **case.overrides)
        return found[name]

    return get


def converse(run: Pair) -> list[list[int]]:
    """Prompts in chunks beside decodes, conversations that go on, heads that are shared, and everything preempted."""
    answers = [run.ask(prompt(length, seed), max_tokens=16, eos=()) for seed, length in enumerate((50, 3, 23, 9, 37))]
    run.run()
    said = answers[0]
    again = said.prompt + said.tokens + prompt(5, 2)
    asked = [again, said.prompt[:30] + prompt(8, 3), said.prompt, said.prompt[:24]]
    answers += [run.ask(tokens, max_tokens=10, eos=()) for tokens in asked]
    run.run()
    assert run.core.counts.cached_tokens >= 64 + 16 + 48 + 16
    answers += [run.ask(prompt(20 + seed, 30 + seed), max_tokens=12, eos=()) for seed in range(4)]
    run.preempt_often(40)
    run.run()
    assert run.core.counts.preemptions > 3
    assert run.core.use.used == 0
    return [answer.tokens for answer in answers]


def by_one(checkpoint: Checkpoint, **settings: Any) -> list[list[int]]:
    return converse(Pair(build(None, checkpoint.folder, **{**SIZES, **settings})))


def by_ranks(checkpoint: Checkpoint, size: int = 2, stages: int = 1, **settings: Any) -> list[list[int]]:
    with ranked_pair(checkpoint.folder, size, stages, **{**SIZES, **settings}) as run:
        return converse(run)


def cases(*always: str) -> Any:
    """All of them; few where there is not much time."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in always else pytest.mark.slow) for name in CASES]
    )


@cases("qwen3-next-keys-of-both", "granite-hybrid-three-groups", "falcon-h1-norms", "falcon-h1-norms-behind-gates")
def test_two_ranks_say_what_one_does(made: Make, name: str) -> None:
    assert by_ranks(made(name)) == by_one(made(name))


@cases("qwen3-next-ends-recurrent", "granite-hybrid-two-groups", "falcon-h1")
def test_two_stages_say_what_one_does(made: Make, name: str) -> None:
    assert by_ranks(made(name), 1, 2) == by_one(made(name))
