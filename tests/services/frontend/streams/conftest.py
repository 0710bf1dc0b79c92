"""A pair of frontends with a chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.redis_server import RedisServer
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import count_up
from tests.services.frontend.streams.pair import Pair, paired
from tests.services.frontend.tool_model import CALLS, tool_model_folder


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    started.start()
    yield started
    started.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tool_folder: Path, server: RedisServer) -> AsyncIterator[Pair]:
    async with paired(tool_folder, server) as found:
        yield found


@pytest.fixture
def speaks(pair: Pair, tool_folder: Path) -> Iterator[None]:
    """Returns the output of a model that calls tools."""
    pair.script.model = replying(tool_folder, CALLS)
    yield
    pair.script.model = count_up
