"""What documents of a request are compared with, token by token: each query is read once, whoever names it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from quire.services.frontend.request.request import LateInteractionPrompt, Prompt
from quire.services.frontend.scheduler_client.sequence import LateQuery


class LateQueryCache:
    """Of one request."""

    def __init__(self, read: Callable[[LateInteractionPrompt], Awaitable[LateQuery]]) -> None:
        self._read = read
        self._queries: dict[str, LateQuery] = {}

    async def query_for(self, prompt: Prompt) -> tuple[LateQuery | None, int]:
        """None for a prompt that is compared with nothing; and how many tokens have been read for it."""
        if not isinstance(prompt, LateInteractionPrompt) or prompt.query is None:
            return None, 0
        known = self._queries.get(prompt.query)
        if known is not None:
            return known, 0
        query = self._queries[prompt.query] = await self._read(LateInteractionPrompt(prompt.query, is_query=True))
        return query, query.num_tokens
