"""A GGUF file is converted to a folder once, even by concurrent processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.models import model_hub, model_identity
from tests.shared.gguf.conftest import Write


def test_a_model_is_found_by_its_file(write: Write) -> None:
    file = write()
    folder = model_hub.find(str(file), weights=True)
    assert model_hub.cached_folder(str(file)) == folder
    assert folder.name == "small"
    assert model_hub.served_name(str(file), folder) == ""
    assert model_identity.identity(folder).name == "small"
    assert model_hub.is_complete(folder, weights=True)
    assert (folder / "small.gguf").samefile(file)


def test_it_is_written_once_and_anew_when_the_file_changes(write: Write) -> None:
    file = write()
    first = model_hub.find(str(file), weights=True)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert model_hub.find(str(file), weights=True) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    write({"llama.context_length": 64})
    os.utime(file, ns=(1, 1))
    second = model_hub.find(str(file), weights=True)
    assert model_identity.read_config(first)["max_position_embeddings"] == 128
    assert model_identity.read_config(second)["max_position_embeddings"] == 64


def test_many_at_once_agree(write: Write, cache: Path) -> None:
    file = write()
    with ThreadPoolExecutor(8) as pool:
        folders = {*pool.map(lambda _: model_hub.find(str(file), weights=True), range(32))}
    assert len(folders) == 1
    assert len(list((cache / "quire" / "gguf").iterdir())) == 1


def test_what_was_refused_leaves_nothing(write: Write, cache: Path) -> None:
    with pytest.raises(InvalidArgument):
        model_hub.find(str(write({"llama.block_count": 7})), weights=True)
    assert not cache.exists()


def test_where_nothing_can_be_written_the_place_is_named(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidArgument, match=r"cannot write its config and tokenizer to .*set XDG_CACHE_HOME"):
        model_hub.find(str(write()), weights=True)
