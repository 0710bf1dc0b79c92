"""Folders that many tests read; made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.frontend.tokenizer.tokenizer import Tokenizer
from tests.services.frontend.tiny_folder import metaspace_tokenizer, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, threads=1)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_folder(
        tmp_path_factory.mktemp("models") / "metaspace", tokenizer=metaspace_tokenizer(), eos_token_id=2
    )
    return Tokenizer(path, threads=1)
