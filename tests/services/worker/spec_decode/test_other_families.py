"""A draft model may belong to another family than the model if its tokens are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.spec_decode.pair import Pair, build

TOKENS = {f"t{number}": number for number in range(VOCAB_SIZE)}


def tokens_of(folder: Path, path: Path, vocabulary: dict[str, int]) -> Path:
    """Copies the checkpoint and adds a tokenizer."""
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return path


def test_a_llama_drafts_for_a_qwen3(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    """The text is unchanged; a model that drafts for itself is almost always accepted."""
    model = tokens_of(checkpoint("qwen3-tied").folder, tmp_path / "model", TOKENS)
    drafters = {name: tokens_of(checkpoint(name).folder, tmp_path / name, TOKENS) for name in ("llama", "qwen3-tied")}
    texts, accepted = [], []
    for folder in (None, *drafters.values()):
        speculation = None
        if folder is not None:
            speculation = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(folder)}
            speculation["adaptive_length"] = False
        pair = Pair(build(speculation, model, num_blocks=100, max_num_seqs=4))
        for number in range(4):
            pair.ask([(7 * number + i) % VOCAB_SIZE for i in range(3 + 9 * number)], 30, eos=())
        pair.run()
        texts.append([answer.tokens for answer in pair.answers])
        counts = pair.core.speculation.counts
        assert (counts.draft_tokens > 50) == (folder is not None)
        accepted.append(counts.accepted_tokens / max(1, counts.draft_tokens))
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
    assert accepted[1] < 0.5
    assert accepted[2] > 0.9


def test_the_error_for_another_tokenizer_names_both_tokens(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    model = tokens_of(checkpoint("qwen3-tied").folder, tmp_path / "model", TOKENS)
    other = tokens_of(checkpoint("llama").folder, tmp_path / "other", TOKENS | {"t5": 9, "t9": 5})
    speculation = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(other)}
    with pytest.raises(InvalidArgument) as refusal:
        build(speculation, model)
    assert refusal.value.message == (
        f"speculative_config.model: token 5 is 't9' in {other / 'tokenizer.json'} and 't5' in "
        f"{model / 'tokenizer.json'}: drafts need the model's tokenizer"
    )
