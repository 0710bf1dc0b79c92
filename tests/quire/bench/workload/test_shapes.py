"""Folders that a server can start from without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire import bundled
from quire.bench.workload import shapes
from quire.shared.errors import InvalidArgument
from tests.spec_decode.pair import Pair, build
from tools.bench import speculation


@pytest.mark.parametrize(
    ("name", "vocab_size"), [("qwen3-0.6b", 151_936), ("qwen3-1.7b-w4a16", 151_936), ("llama3-8b", 128_256)]
)
def test_a_shape_is_a_folder_with_a_config_and_a_tokenizer(name: str, vocab_size: int, tmp_path: Path) -> None:
    shape = shapes.prepare(name, tmp_path)
    assert (shape.vocab_size, shape.random_weights) == (vocab_size, True)
    assert shape.folder is not None
    assert shape.folder.name == name
    assert json.loads((shape.folder / "config.json").read_text())["vocab_size"] == vocab_size
    tokenizer = Tokenizer.from_file(str(shape.folder / "tokenizer.json"))
    assert tokenizer.encode(f"w0 w{vocab_size - 1} other").ids == [0, vocab_size - 1, 2]
    assert tokenizer.decode([5, 77]) == "w5 w77"


def test_the_bundled_model_is_tiny(tmp_path: Path) -> None:
    assert shapes.prepare("tiny", tmp_path) == shapes.BenchShape("tiny", 4096)


def test_any_model_folder_is_a_shape(tmp_path: Path) -> None:
    shape = shapes.prepare(str(bundled.FOLDER), tmp_path)
    assert (shape.folder, shape.vocab_size, shape.random_weights) == (bundled.FOLDER, 4096, False)


def test_an_unknown_shape_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tiny, qwen3-0\.6b, .*llama3-8b"):
        shapes.prepare("qwen9", tmp_path)


@pytest.mark.parametrize(("method", "kind"), speculation.WITH_WEIGHTS.items())
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3-8b"])
def test_a_shape_has_drafters_of_random_weights(
    name: str, method: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked with a small model of the same family."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    monkeypatch.setitem(shapes.CONFIGS, name, shapes.CONFIGS[name] | small)
    shape = shapes.prepare(name, tmp_path)
    assert shape.folder is not None
    drafter = shapes.drafters(shape, tmp_path) / kind
    config = {"method": method, "model": str(drafter), "num_speculative_tokens": 3, "adaptive_length": False}
    replica = build(config, shape.folder, load_format="dummy", max_model_len=512)
    pair = Pair(replica)
    answer = pair.ask(range(10, 20), 20, eos=())
    pair.run()
    assert len(answer.tokens) == 20
    assert pair.core.speculation.counts.draft_tokens > 20


def test_drafters_of_the_bundled_model_are_bundled(tmp_path: Path) -> None:
    folder = shapes.drafters(shapes.prepare("tiny", tmp_path), tmp_path)
    assert sorted(each.name for each in folder.iterdir() if each.is_dir()) == ["draft", "eagle", "medusa"]
