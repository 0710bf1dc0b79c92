"""One cluster for all tests of this folder: its start takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.sound.served import Served, whisper_cluster


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with whisper_cluster(tmp_path_factory.mktemp("models") / "whisper") as found:
        yield found
