"""Identity of stored blocks: every byte of the weights counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.services.worker.models.loading.weight_files import FILES
from quire.services.worker.offload.identity import cache_identity, weights_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(20 << 20))
    (folder / "config.json").write_text("{}")
    return folder


def test_one_changed_byte_makes_other_weights(model: Path, tmp_path: Path) -> None:
    memo = tmp_path / "weights.json"
    before = weights_digest(model, FILES, memo)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(12_345_678)
        file.write(b"\x01")
    assert weights_digest(model, FILES, memo) != before
    assert weights_digest(model, FILES, tmp_path / "none.json") == weights_digest(model, FILES, memo)


def test_files_are_read_once(model: Path, tmp_path: Path) -> None:
    """With other noted digests the result is another one, so that it is of the notes."""
    memo = tmp_path / "weights.json"
    before = weights_digest(model, FILES, memo)
    noted = json.loads(memo.read_text())
    assert weights_digest(model, FILES, memo) == before
    memo.write_text(json.dumps(dict.fromkeys(noted, "0" * 64)))
    assert weights_digest(model, FILES, memo) != before


@pytest.mark.parametrize("noted", ["", "[]", "{", '{"x": 1}'])
def test_notes_that_are_none_cost_a_reading(model: Path, tmp_path: Path, noted: str) -> None:
    memo = tmp_path / "weights.json"
    before = weights_digest(model, FILES, memo)
    memo.write_text(noted)
    assert weights_digest(model, FILES, memo) == before


def test_unknown_weights_never_match(tmp_path: Path) -> None:
    found = {weights_digest(tmp_path, FILES, tmp_path / "weights.json") for _ in range(2)}
    assert len(found) == 2


def test_every_fact_counts() -> None:
    facts = [
        cache_identity(b"l", "w", device="cpu")[0],
        cache_identity(b"m", "w", device="cpu")[0],
        cache_identity(b"l", "v", device="cpu")[0],
        cache_identity(b"l", "w", device="cuda")[0],
    ]
    assert len(set(facts)) == 4
