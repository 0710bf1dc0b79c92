"""Every rank of a replica encodes pictures; parallelism without a place for their rows is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from tests.services.worker.media.pictures import greedy, identifier_of, make_llava, picture, prompt_with
from tests.services.worker.ranks.ranked_pair import ranked_pair
from tests.spec_decode.pair import build

NUM_TOKENS = 8


def test_two_ranks_answer_as_transformers_does(tmp_path: Path) -> None:
    model = make_llava(tmp_path, "llama")
    pictures = [picture(1), picture(2)]
    prompts = [(5, pictures[0], 3, pictures[1], 2), (9,), (pictures[1], 6)]
    with ranked_pair(tmp_path, block_size=4, max_num_batched_tokens=24) as pair:
        pair.pixels = {identifier_of(one): one for one in pictures}
        for parts in prompts:
            tokens, media = prompt_with(*parts)
            pair.ask(tokens, NUM_TOKENS, eos=(), media=media)
        pair.run()
        for parts, answer in zip(prompts, pair.answers, strict=True):
            seen = [part for part in parts if not isinstance(part, int)]
            assert answer.tokens == greedy(model, answer.prompt, seen, NUM_TOKENS)


@pytest.mark.parametrize("field", ["pipeline_parallel_size", "context_parallel_size"])
def test_stages_and_contexts_are_refused_by_name(field: str, tmp_path: Path) -> None:
    make_llava(tmp_path)
    with pytest.raises(InvalidArgument, match=f"{field}: 2 is not supported.*--language-model-only"):
        build(model=tmp_path, **{field: 2})
