"""Several multi-token prediction layers: drafts follow DeepSeek-V3's paper, and the text is that of the model alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.services.worker.spec_decode.draft_models.feature_proposer import FeatureProposer
from tests.kv_groups.models import greedy
from tests.observing import ObservedCall, calls_of
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.spec_decode.test_mtp import (
    MTP,
    NUM_LAYERS,
    OF_FEATURE,
    OF_TOKEN,
    SIZE,
    WAYS,
    drawn,
    forgetful,
    make,
    prompts,
)
from tests.spec_decode.pair import Pair, build

SMALL = {"block_size": 4, "max_num_batched_tokens": 16}  # prompts are chunked


@dataclass
class Definition:
    """Equations 21 to 23 of arXiv 2412.19437 in plain torch, for whole sequences without a cache."""

    made: Checkpoint
    layers: Any
    tensors: dict[str, Tensor]
    _known: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        asked = (tuple(tokens), count)
        if asked not in self._known:
            self._known[asked] = self._drafts(tokens, count)
        return self._known[asked]

    @torch.inference_mode()
    def _drafts(self, tokens: list[int], count: int) -> list[int]:
        model, said = self.made.model.model, list(tokens)
        features = given = model(torch.tensor([said[:-1]])).last_hidden_state[0]
        for k in range(count):
            depth = min(k, len(self.layers) - 1)
            # The last module continues from its own latest feature.
            given = features if k == depth else torch.cat((given, features[-1:]))
            features = self._module(depth, given, said[depth + 1 :])
            said.append(int(self.made.model.lm_head(self._rms(depth, "shared_head.norm", features[-1])).argmax()))
        return said[len(tokens) :]

    def _module(self, depth: int, features: Tensor, tokens: list[int]) -> Tensor:
        model, positions = self.made.model.model, torch.arange(len(tokens))[None]
        embedded = self._rms(depth, "enorm", model.embed_tokens(torch.tensor(tokens)))
        both = torch.cat((embedded, self._rms(depth, "hnorm", features)), dim=1)
        x = (both @ self._tensor(depth, "eh_proj").T)[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        angles = model.rotary_emb(x, positions)
        x = self.layers[depth](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        made: Tensor = (x[0] if isinstance(x, tuple) else x)[0]
        return made

    def _rms(self, depth: int, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (SIZE,), self._tensor(depth, name), self.made.model.config.rms_norm_eps)

    def _tensor(self, depth: int, name: str) -> Tensor:
        return self.tensors[f"model.layers.{NUM_LAYERS + depth}.{name}.weight"]


Proposed = list[tuple[list[int], list[int]]]  # known tokens of a sequence, and its drafts


@pytest.fixture
def proposed() -> Iterator[Proposed]:
    found: Proposed = []

    def record(call: ObservedCall) -> None:
        drafts, history = call.result, call.arguments["request"].history
        if drafts is not None:
            tokens = iter(drafts.token_ids.tolist())
            for slot, count in zip(drafts.slots.tolist(), drafts.counts.tolist(), strict=True):
                found.append((history.tokens_of(slot).tolist(), [next(tokens) for _ in range(count)]))

    with calls_of(FeatureProposer.propose, on_return=record):
        yield found


def asking(num_drafts: int, **more: Any) -> dict[str, Any]:
    return {**MTP, "num_speculative_tokens": num_drafts, **more}


def some_right(num_modules: int) -> list[Tensor]:
    return [OF_TOKEN + 0.2 * drawn(SIZE, 2 * SIZE, seed=20 + depth) for depth in range(num_modules)]


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, float], Definition]:
    """Returns definitions by number of modules and contribution of the layers; each is built once and shared
    read-only."""
    known: dict[tuple[int, float], Definition] = {}

    def get(num_modules: int, contribution: float = 1.0) -> Definition:
        asked = (num_modules, contribution)
        if asked not in known:
            folder = tmp_path_factory.mktemp("modules")
            made, (layers, tensors) = make(folder, *some_right(num_modules), contribution=contribution)
            known[asked] = Definition(made, layers, tensors)
        return known[asked]

    return get


def check(proposed: Proposed, definition: Definition) -> None:
    for tokens, drafts in proposed:
        assert drafts == definition.drafts(tokens, len(drafts)), len(tokens)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("contribution", [1.0, 0.01])
@pytest.mark.parametrize(("num_modules", "num_drafts"), [(1, 3), (2, 2), (2, 5), (3, 2), (3, 5)])
def test_drafts_are_what_the_paper_defines(
    defined: Callable[[int, float], Definition],
    proposed: Proposed,
    num_modules: int,
    num_drafts: int,
    contribution: float,
    way: dict[str, Any],
) -> None:
    """Covers chunked prompts and outputs, after drafts that were wrong, right or partly right."""
    definition = defined(num_modules, contribution)
    made = definition.made
    run = Pair(build(asking(num_drafts), made.folder, num_blocks=200, max_num_seqs=4, **SMALL, **way))
    asked = [run.ask(tokens, max_tokens=9, eos=()) for tokens in [*prompts(), [7], [5, 9]]]
    run.run()
    assert [a.tokens for a in asked] == [greedy(made, a.prompt, 9) for a in asked]
    check(proposed, definition)
    assert max(len(drafts) for _, drafts in proposed) == num_drafts
    if contribution < 1:
        found = run.core.speculation.counts.accepted_by_position.tolist()
        assert 0 < found[1] < found[0] < len(proposed), found


@pytest.mark.parametrize("num_modules", [2, 3])
def test_drafts_are_the_same_after_a_shared_prefix(
    defined: Callable[[int], Definition], proposed: Proposed, num_modules: int
) -> None:
    """The blocks hold the KV of all modules: the sequence that filled them continued like this one."""
    definition = defined(num_modules)
    made = definition.made
    run = Pair(build(asking(4), made.folder, num_blocks=200, max_num_seqs=4, **SMALL))
    first = run.ask(prompts()[0], max_tokens=12, eos=())
    run.run()
    proposed.clear()
    again = run.ask([*first.prompt, *first.tokens[:9]], max_tokens=8, eos=())
    run.run()
    assert run.core.counts.cached_tokens >= 36
    assert again.tokens == greedy(made, again.prompt, 8)
    assert len(proposed[0][0]) == len(again.prompt) + 1
    check(proposed, definition)


@pytest.mark.parametrize("way", [*WAYS, pytest.param({"device": "cuda"}, marks=pytest.mark.gpu)], ids=str)
def test_each_draft_comes_from_its_module_and_further_ones_from_the_last(tmp_path: Path, way: dict[str, Any]) -> None:
    """A module that ignores the token predicts one position too early; the text is that without drafts. If two tokens
    are almost equally likely, good layers may draft the other one."""
    good = forgetful(tmp_path / "good", OF_TOKEN, OF_TOKEN, OF_TOKEN)
    run = Pair(build(asking(5), good.folder, num_blocks=200, max_num_seqs=4, **way))
    asked = [run.ask(tokens, max_tokens=40, eos=()) for tokens in prompts()]
    run.run()
    assert [a.tokens for a in asked] == [greedy(good, a.prompt, 40) for a in asked]
    counts = run.core.speculation.counts
    assert counts.accepted_tokens > 0.75 * counts.draft_tokens > 0, counts
    assert run.num_steps < 20
    third = forgetful(tmp_path / "third", OF_TOKEN, OF_TOKEN, OF_FEATURE)
    run = Pair(build(asking(5), third.folder, num_blocks=200, max_num_seqs=4, **way))
    asked = [run.ask(tokens, max_tokens=40, eos=()) for tokens in prompts()]
    run.run()
    assert [a.tokens for a in asked] == [greedy(third, a.prompt, 40) for a in asked]
    counts = run.core.speculation.counts
    first, second, later, *_ = counts.accepted_by_position.tolist()
    assert second > 0.7 * counts.drafts > 0, counts
    assert first >= second > 2 * later, counts


def test_preemption_and_prefixes_with_different_continuations(tmp_path: Path) -> None:
    made = forgetful(tmp_path, OF_TOKEN, OF_TOKEN, OF_TOKEN)
    run = Pair(build(asking(3), tmp_path, num_blocks=200, max_num_seqs=4, **SMALL))
    first = run.ask(prompts()[0], max_tokens=12, eos=())
    run.run()
    ends = ([*first.prompt, *first.tokens, 5], [*first.prompt[:20], 7], prompts()[1])
    again = [run.ask(tokens, max_tokens=30, eos=()) for tokens in ends]
    run.preempt_often(12)
    run.run()
    assert [a.tokens for a in again] == [greedy(made, a.prompt, 30) for a in again]
    assert run.core.counts.cached_tokens >= 40 + 16
    assert run.core.counts.preemptions >= 2
    counts = run.core.speculation.counts
    assert counts.accepted_tokens > 0.8 * counts.draft_tokens > 0, counts


@pytest.mark.parametrize("num_drafts", [2, 6])
def test_sampled_text_is_unchanged(tmp_path: Path, num_drafts: int) -> None:
    """Varies the draft length from zero to the maximum; blocks run short for some of the time."""
    make(tmp_path, *some_right(3), contribution=0.01)
    said = []
    for speculation in (None, asking(num_drafts, adaptive_length=True), asking(num_drafts)):
        run = Pair(build(speculation, tmp_path, num_blocks=36, max_num_seqs=4, **SMALL))
        ways = ({"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "seed": 4, "top_p": 0.9}, {"temperature": 0.0})
        asked = [run.ask(tokens, 40, (), **ways[i % 3]) for i, tokens in enumerate([*prompts(), *prompts()])]
        run.run()
        said.append([a.tokens for a in asked])
    assert said[0] == said[1] == said[2]
    assert run.core.counts.preemptions > 0, run.core.counts
    assert run.core.speculation.counts.accepted_tokens > 0
