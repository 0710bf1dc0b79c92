"""Recurrent layers divided among ranks, by heads or as a whole: schedulers get one rank's text, with chunked, cached
and preempted prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from quire.kernels.state_pages import StateShape
from quire.services.worker.building.checks import state_blocks
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.registry import read_model_config
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings
from tests.kv_groups.test_recurrent_drafts import THREE, check_drafts
from tests.kv_groups.test_windows import prompt
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.ranks import oracle_drafts_build
from tests.services.worker.ranks.ranked_pair import ranked_pair
from tests.services.worker.step.test_beam_moves import MAX_ERROR_OF_STATES
from tests.spec_decode.pair import Answer, Pair, build

SIZES = {"block_size": 16, "max_num_batched_tokens": 20, "num_blocks": 300}


@dataclass(frozen=True)
class Case:
    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 7  # of mixtures one with which no token's choice of experts is a matter of rounding


CASES = {
    "qwen3-next": Case("qwen3-next", seed=20),
    "qwen3-next-tied": Case("qwen3-next-tied", seed=11),
    "qwen3-next-one-key-head": Case("qwen3-next", {"linear_num_key_heads": 1}, seed=13),
    "qwen3-next-keys-of-both": Case("qwen3-next", {"linear_num_key_heads": 3}, seed=9),
    "qwen3-next-ends-recurrent": Case("qwen3-next-ends-recurrent", seed=9),
    "granite-hybrid-one-group": Case("granite-hybrid", {"mamba_n_groups": 1}),
    "granite-hybrid-two-groups": Case("granite-hybrid", {"mamba_n_groups": 2}),
    "granite-hybrid-three-groups": Case("granite-hybrid", {"mamba_n_groups": 3}),
    "granite-hybrid-experts": Case("granite-hybrid-experts", {"mamba_n_groups": 1}, seed=21),
    "falcon-h1": Case("falcon-h1"),
    "falcon-h1-norms": Case("falcon-h1-norms"),
    "falcon-h1-norms-one-group": Case("falcon-h1-norms", {"mamba_n_groups": 1}),
    "falcon-h1-norms-behind-gates": Case("falcon-h1-norms", {"mamba_n_groups": 3, "mamba_norm_before_gate": False}),
}
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
FOUR_RANKS = {  # groups and key heads are fewer
    "qwen3-next-eight-heads": Case("qwen3-next", {**EIGHT_HEADS, "linear_num_value_heads": 8}, seed=10),
    "falcon-h1-eight-heads": Case("falcon-h1-norms", {**EIGHT_HEADS, "mamba_n_heads": 8}),
}
Make = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints by case name."""
    found: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in found:
            case = (CASES | FOUR_RANKS)[name]
            folder = tmp_path_factory.mktemp(name)
            found[name] = checkpoints.make(case.family, folder, seed=case.seed, keeps_groups=True, **case.overrides)
        return found[name]

    return get


@dataclass(frozen=True)
class Said:
    texts: list[list[int]]  # prompts and answers
    logprobs: torch.Tensor  # of each token of the answers


def converse(run: Pair) -> Said:
    """Chunked prompts with decodes, conversations that continue, shared prefixes, and preemption of everything."""

    def ask(tokens: list[int], max_tokens: int) -> Answer:
        return run.ask(tokens, max_tokens=max_tokens, eos=(), logprobs=0)

    answers = [ask(prompt(length, seed), 16) for seed, length in enumerate((50, 3, 23, 9, 37))]
    run.run()
    said = answers[0]
    again = said.prompt + said.tokens + prompt(5, 2)
    answers += [ask(tokens, 10) for tokens in (again, said.prompt[:30] + prompt(8, 3), said.prompt, said.prompt[:24])]
    run.run()
    assert run.core.counts.cached_tokens >= 64 + 16 + 48 + 16
    answers += [ask(prompt(20 + seed, 30 + seed), 24) for seed in range(4)]
    run.preempt_often(40)
    run.run()
    assert run.core.counts.preemptions > 3
    assert run.core.use.used == 0
    logprobs = torch.tensor([values[0] for answer in answers for _, values, _ in answer.logprobs])
    assert len(logprobs) == sum(len(answer.tokens) for answer in answers)
    return Said([answer.prompt + answer.tokens for answer in answers], logprobs)


def check(found: Said, expected: Said) -> None:
    assert found.texts == expected.texts
    assert float((found.logprobs - expected.logprobs).abs().max()) < MAX_ERROR_OF_STATES


def by_one(checkpoint: Checkpoint, **settings: Any) -> Said:
    return converse(Pair(build(None, checkpoint.folder, **{**SIZES, **settings})))


def by_ranks(checkpoint: Checkpoint, size: int = 2, stages: int = 1, **settings: Any) -> Said:
    with ranked_pair(checkpoint.folder, size, stages, **{**SIZES, **settings}) as run:
        return converse(run)


def cases(*always: str) -> Any:
    """All cases; few in the fast run."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in always else pytest.mark.slow) for name in CASES]
    )


@cases("qwen3-next-keys-of-both", "granite-hybrid-three-groups", "falcon-h1-norms", "falcon-h1-norms-behind-gates")
def test_two_ranks_match_one(made: Make, name: str) -> None:
    check(by_ranks(made(name)), by_one(made(name)))


@cases("qwen3-next-ends-recurrent", "granite-hybrid-two-groups", "falcon-h1")
def test_two_stages_match_one(made: Make, name: str) -> None:
    check(by_ranks(made(name), 1, 2), by_one(made(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_match_one(made: Make, name: str) -> None:
    check(by_ranks(made(name), 4), by_one(made(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1-norms-behind-gates"])
def test_two_stages_of_two_ranks_match_one(made: Make, name: str) -> None:
    check(by_ranks(made(name), 2, 2), by_one(made(name)))


@pytest.mark.parametrize("backend", ["allreduce", pytest.param("alltoall", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid-experts"])
def test_expert_parallel_ranks_match_one(made: Make, name: str, backend: str) -> None:
    check(by_ranks(made(name), expert_parallel=True, all2all_backend=backend), by_one(made(name)))


@pytest.mark.slow
def test_experts_that_move_leave_states_alone(made: Make) -> None:
    eplb = {"enable_eplb": True, "eplb_step_interval": 1, "num_redundant_experts": 2}
    check(by_ranks(made("qwen3-next"), expert_parallel=True, **eplb), by_one(made("qwen3-next")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid-three-groups", "falcon-h1-norms"])
def test_drafts_change_no_state_on_any_rank(made: Make, name: str) -> None:
    checkpoint = made(name)
    expected = by_one(checkpoint)
    build_part = functools.partial(oracle_drafts_build.build, expected.texts)
    with ranked_pair(checkpoint.folder, speculation=THREE, build_part=build_part, **SIZES) as run:
        oracle_drafts_build.know(run.replica, expected.texts)
        check(converse(run), expected)
        check_drafts(run)


def test_a_rank_keeps_the_states_of_its_own_heads() -> None:
    whole = qwen3_next().recurrent
    assert whole is not None
    parts = [whole.of_rank(Shard(rank, 4)).state for rank in range(4)]
    assert parts == [StateShape(2 * 4 * 128 + 8 * 128, 4, 8, 128, 128)] * 4


@pytest.mark.parametrize(("size", "block_size"), [(1, 1088), (2, 1152), (4, 576), (8, 320)])
def test_blocks_are_as_long_on_all_ranks_as_their_states_take(size: int, block_size: int) -> None:
    """Two ranks halve the two key heads and the states; more ranks divide only the states."""
    limits, settings = WorkerLimits(64, 512, 8192, 4096), WorkerSettings(model="x", tensor_parallel_size=size)
    lengths = {
        state_blocks.fit(limits, qwen3_next(), torch.bfloat16, settings, shard=Shard(rank, size)).block_size
        for rank in range(size)
    }
    assert lengths == {block_size}


def qwen3_next() -> DecoderConfig:
    """Configuration with the sizes of the real model."""
    config = transformers.Qwen3NextConfig().to_dict()
    return read_model_config({**config, "architectures": ["Qwen3NextForCausalLM"]})


def test_heads_that_ranks_do_not_divide_are_refused_by_the_names_of_their_families() -> None:
    delta = qwen3_next().recurrent
    granite = transformers.GraniteMoeHybridConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    space = read_model_config({**granite.to_dict(), "architectures": ["GraniteMoeHybridForCausalLM"]}).recurrent
    assert delta is not None
    assert space is not None
    for recurrent, name in ((delta, "linear_num_value_heads, 32"), (space, "mamba_n_heads, 128")):
        with pytest.raises(InvalidArgument, match=f"tensor_parallel_size: 3 ranks do not divide {name}"):
            recurrent.of_rank(Shard(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in (CASES | FOUR_RANKS).items() if case.seed != 7])
def test_no_choice_of_experts_is_a_matter_of_rounding(made: Make, name: str) -> None:
    """Near ties would be decided differently by two devices."""
    checkpoint, margins = made(name), []
    model, num_chosen = checkpoint.model, checkpoint.model.config.num_experts_per_tok

    def note(router: torch.nn.Module, inputs: tuple[torch.Tensor], _: Any) -> None:
        scores = inputs[0].flatten(0, -2) @ router.weight.T
        likeliest = scores.topk(num_chosen + 1).values
        margins.append(float((likeliest[:, -2] - likeliest[:, -1]).min()))

    with torch.inference_mode():
        for module_name, module in model.named_modules():
            if module_name.endswith(("mlp.gate", "block_sparse_moe.router")):
                module.register_forward_hook(note)
        for text in by_one(checkpoint).texts:
            model(torch.tensor([text]))
    assert min(margins) > MAX_ERROR_OF_STATES
