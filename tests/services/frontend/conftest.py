"""Fixtures with model folders that many tests read."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from fastapi._compat import v2 as openapi_models

from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from tests.redis_server import RedisServer
from tests.services.frontend.directory.published_caches import Published
from tests.services.frontend.tiny_folder import metaspace_tokenizer, write_folder

# Half of the time of an OpenAPI document, of which every frontend makes its own.
openapi_models.get_model_fields = functools.cache(openapi_models.get_model_fields)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture
async def published(redis_server: RedisServer, folder: Path) -> AsyncIterator[Published]:
    written = Published(redis_server.url, folder)
    yield written
    await written.close()


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, threads=1)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_folder(
        tmp_path_factory.mktemp("models") / "metaspace", tokenizer=metaspace_tokenizer(), eos_token_id=2
    )
    return Tokenizer(path, threads=1)
