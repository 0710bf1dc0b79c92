"""Cache of the queries that a request's documents are compared with: each distinct query is read once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from quire.services.frontend.request.request import LateInteractionPrompt, Prompt
from quire.services.frontend.scheduler_client.sequence import LateQuery


class LateQueryCache:
    """Query cache of one request."""

    def __init__(self, read: Callable[[LateInteractionPrompt], Awaitable[LateQuery]]) -> None:
        self._read = read
        self._queries: dict[str, LateQuery] = {}

    async def query_for(self, prompt: Prompt) -> tuple[LateQuery | None, int]:
        """Returns the query of a prompt (None if it has none), and the number of tokens read for it."""
        if not isinstance(prompt, LateInteractionPrompt) or prompt.query is None:
            return None, 0
        cached = self._queries.get(prompt.query)
        if cached is not None:
            return cached, 0
        query = self._queries[prompt.query] = await self._read(LateInteractionPrompt(prompt.query, is_query=True))
        return query, query.num_tokens
