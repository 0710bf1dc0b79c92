"""A scheduler's core and a worker's replica together: whatever happens to a sequence, its picture is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.step.fetched_item import Pixels
from tests.services.worker.checkpoints import make
from tests.services.worker.media.pictures import (
    NUM_ROWS,
    PLACEHOLDER,
    greedy,
    identifier_of,
    make_llava,
    picture,
    prompt_with,
)
from tests.spec_decode.pair import Answer, Pair, build

NUM_TOKENS = 12
SIZES = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 24}
Saved = tuple[Path, Any]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("llava")
    return folder, make_llava(folder)


Prompt = Sequence[int | Pixels]


class ExpectedAnswers:
    """Prompts with pictures, and the answers that transformers gives."""

    def __init__(self, pair: Pair, model: Any) -> None:
        self.pair, self._model = pair, model
        self._expected: list[tuple[Answer, Callable[[], list[int]]]] = []

    def ask(self, *parts: int | Pixels, outside: bool = False, **sampling: Any) -> Answer:
        """Submits a prompt. `outside`: its placeholders are not in the vocabulary."""
        tokens, media = prompt_with(*parts)
        pictures = [part for part in parts if not isinstance(part, int)]
        self.pair.pixels |= {identifier_of(one): one for one in pictures}
        sent = [100_000 if outside and token == PLACEHOLDER else token for token in tokens]
        answer = self.pair.ask(sent, NUM_TOKENS, eos=(), media=media, **sampling)
        self._expected.append((answer, lambda: greedy(self._model, tokens, pictures, NUM_TOKENS)))
        return answer

    def check(self) -> None:
        """Checks the answers, and that nothing is left behind."""
        for number, (answer, expected) in enumerate(self._expected):
            assert answer.tokens == expected(), number
        outputs, media = self.pair.core.encoder_outputs, self.pair.replica.media
        outputs.check_invariant()
        assert (media.num_rows, media.num_items) == (
            outputs.num_embeddings,
            outputs.num_items,
        )


def asked_of(saved: Saved, speculation: dict[str, Any] | None = None, **settings: Any) -> ExpectedAnswers:
    folder, model = saved
    return ExpectedAnswers(Pair(build(speculation, folder, **(SIZES | settings))), model)


A, B, C = picture(1), picture(2), picture(3)


def test_prompts_in_chunks_with_shared_prefixes(llava: Saved) -> None:
    asked = asked_of(llava)
    for parts in [(5, A, 3), (20,), (5, A, 3, B, 2), (A, B, C, 1), (5, A, 4), (2, C, 30)]:
        asked.ask(*parts)
    asked.pair.run()
    asked.ask(5, A, 3, B, 2, C, 1)  # its first blocks are cached
    asked.pair.run()
    asked.check()


def test_rows_are_computed_again_after_preemption(llava: Saved) -> None:
    asked = asked_of(llava)
    for parts in [(5, A, 3), (9, B, 2, A), (20,), (1, C, 25)]:
        asked.ask(*parts)
    asked.pair.preempt_often(60)
    asked.pair.run()
    asked.check()


def test_a_cache_of_one_picture_serves_many(llava: Saved) -> None:
    asked = asked_of(llava, encoder_cache_size=NUM_ROWS)
    for seed in range(12):
        asked.ask(2, picture(seed % 7), 3)
    asked.pair.run()
    asked.check()
    assert asked.pair.replica.media.num_items == 1


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("outside", [False, True])
def test_drafts_do_not_change_answers(llava: Saved, method: str, outside: bool, tmp_path: Path) -> None:
    """A draft model sees the embeddings of the placeholders."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculation["model"] = str(make("llama", tmp_path).folder)
    asked = asked_of(llava, speculation)
    for parts in [(5, A, 3), (9, B, 2, A, 1), (20,)]:
        asked.ask(*parts, outside=outside)
    asked.pair.preempt_often(20)
    asked.pair.run()
    asked.check()
    assert method == "ngram" or asked.pair.core.speculation.counts.draft_tokens > 0


def test_a_new_scheduler_finds_the_blocks_of_pictures(llava: Saved) -> None:
    asked = asked_of(llava)
    asked.ask(5, A, 3, B, 9, outside=True)
    asked.pair.run()
    held = asked.pair.replica.end_epoch()
    later = ExpectedAnswers(Pair(asked.pair.replica), llava[1])
    later.pair.adopt(held)
    later.ask(5, A, 3, B, 9, outside=True)
    later.ask(5, B, 3, B, 9, outside=True)
    later.pair.run()
    later.check()
    assert later.pair.core.counts.cached_tokens >= 44 - 4
