"""Checks large bodies in a child process first, so that an invalid one does not block the event loop.

Parsing tens of megabytes cannot be interrupted and holds Python's lock. Accepted bodies are parsed again here, within
limits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from json import JSONDecodeError

from quire.services.frontend.bounds.bodies import body_probe
from quire.services.frontend.bounds.bodies.body_probe import BodyCheck
from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES
from quire.services.frontend.bounds.bodies.spool import Spool
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.logs import logger
from quire.shared.process.child import Child, ChildEnded
from quire.shared.settings.request_limits import RequestLimits

log = logger("large bodies")


class LargeBodies:
    """Owns the child process that checks large bodies outside the event loop, one at a time, smallest first."""

    def __init__(self, limits: RequestLimits, prompt_limit: Callable[[], PromptLimit]) -> None:
        """Prepares the process; start() launches it. `prompt_limit`: limit for one prompt, as known now."""
        self.child = Child(body_probe.__name__, json.dumps(asdict(limits)).encode())
        self._prompt_limit = prompt_limit
        self.thread = ThreadPoolExecutor(1, "large-bodies")
        self._turns = SmallestFirstLimiter(1)

    async def check(self, spool: Spool, kind: str = body_probe.JSON, *, num_json: int | None = None) -> bool:
        """Checks a spooled body in the child process. Returns whether it was checked: False for small ones, or if the
        process does not answer; the caller checks those. Long lists of ids may have been extracted. `num_json`: length
        of the JSON part, if other bytes follow. Raises JSONDecodeError, InvalidArgument."""
        num_bytes = spool.num_bytes if num_json is None else num_json
        if num_bytes <= HEAVY_BYTES or spool.path is None:
            return False
        prompt_limit = self._prompt_limit()
        question = BodyCheck(
            spool.path, num_bytes, num_json is None, kind, prompt_limit.max_model_len, prompt_limit.longest_token
        )
        async with self._turns.slot(num_bytes):
            try:
                answer = await self._ask(question, spool)
            except (ChildEnded, Internal, OSError) as error:  # the caller checks the body itself
                log.warning("the process that checks large bodies does not answer", reason=str(error))
                return False
        if answer:
            result = json.loads(answer)
            if body_probe.IDS_BEGIN in result:
                spool.mark_ids(result[body_probe.IDS_BEGIN])
                return True
            if result.get("kind") == body_probe.UNREAD:
                return False
            if result.get("kind") == body_probe.NO_JSON:
                raise JSONDecodeError(result["message"], "", result["position"])
            raise InvalidArgument(result["message"], field=result["field"], reason=result["reason"])
        return True

    @property
    def pid(self) -> int | None:
        """Process id, while the process runs."""
        return self.child.pid

    def start(self) -> None:
        """Starts the process ahead of the first large body."""
        self.thread.submit(self.child.start)

    async def _ask(self, question: BodyCheck, spool: Spool) -> bytes:
        """Asks the process. The spool's file stays open until the answer even if the caller is cancelled: otherwise the
        process could read another client's body under the same descriptor number, and write to it."""
        with ExitStack() as stack:
            path = stack.enter_context(spool.pinned_path())
            future = self.thread.submit(self.child.ask, replace(question, path=path).encode())
            pinned = stack.pop_all()
        future.add_done_callback(lambda _: pinned.close())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.child.close()
