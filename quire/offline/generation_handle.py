"""Handle of one continuation, which can be awaited or iterated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from copy import copy
from dataclasses import replace
from typing import Any

from quire.async_client import AsyncClient
from quire.outputs import OutputCollector, RequestOutput
from quire.params import SamplingParams
from quire.requests import Prompt, RequestOptions, plain


class GenerationHandle(Coroutine[Any, Any, RequestOutput]):
    """`await` returns the complete result; `async for` yields the growing result, complete at the end.

    It is a coroutine, so that gather(), create_task() and wait_for() accept it. The request is sent only then.
    """

    def __init__(
        self,
        client: AsyncClient,
        prompt: Prompt,
        params: SamplingParams | None,
        options: Callable[[], Awaitable[RequestOptions]],
    ) -> None:
        """`options`: awaited before the request, because an adapter may have to be loaded."""
        self._client = client
        self._prompt = prompt
        self._params = params
        self._options = options
        self._whole: Coroutine[Any, Any, RequestOutput] | None = None

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Sends the request and yields the cumulative output after every message, each as an independent copy."""
        gathered = OutputCollector(plain(self._prompt))
        async for message in self._client.messages(self._prompt, self._params, await self._options()):
            gathered.add(message)
            yield _still(gathered.result)

    def _awaited(self) -> Coroutine[Any, Any, RequestOutput]:
        if self._whole is None:
            self._whole = self._generated()
        return self._whole

    async def _generated(self) -> RequestOutput:
        return await self._client.generate(self._prompt, self._params, await self._options())

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self._awaited().__await__()

    def send(self, value: Any) -> Any:
        return self._awaited().send(value)

    def throw(self, *raised: Any) -> Any:
        return self._awaited().throw(*raised)

    def close(self) -> None:
        if self._whole is not None:
            self._whole.close()


def _still(result: RequestOutput) -> RequestOutput:
    """Returns a copy of the result whose lists do not change as further output arrives."""
    outputs = [
        replace(output, token_ids=[*output.token_ids], logprobs=copy(output.logprobs)) for output in result.outputs
    ]
    return replace(result, outputs=outputs)
