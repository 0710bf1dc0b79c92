"""Large bodies are looked at in a process of their own first: one that is no use costs the event loop nothing.

Parsing tens of megabytes cannot be interrupted and keeps Python's lock. What is let in is parsed once more here, within
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
from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.logs import logger
from quire.shared.process.child import Child, ChildEnded
from quire.shared.settings.request_limits import RequestLimits

log = logger("large bodies")


class LargeBodies:
    """Owns the process, which is asked about one body after the other, the smallest first."""

    def __init__(self, limits: RequestLimits, prompt_limit: Callable[[], PromptLimit]) -> None:
        """`prompt_limit`: for one prompt, by what is known now."""
        self.child = Child(body_probe.__name__, json.dumps(asdict(limits)).encode())
        self._prompt_limit = prompt_limit
        self.thread = ThreadPoolExecutor(1, "large-bodies")
        self._turns = SmallestFirstLimiter(1)

    async def check(self, spool: Spool, kind: str = body_probe.JSON, *, num_json: int | None = None) -> bool:
        """Whether it has been checked, which small ones are not; long lists of ids may have been taken out of it.
        `num_json`: how many of its bytes are JSON, if others follow. JSONDecodeError, InvalidArgument."""
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
            except (ChildEnded, Internal, OSError) as error:  # it is looked at here then
                log.warning("the process that looks at large bodies does not answer", reason=str(error))
                return False
        if answer:
            found = json.loads(answer)
            if body_probe.IDS_BEGIN in found:
                spool.mark_ids(found[body_probe.IDS_BEGIN])
                return True
            if found.get("kind") == body_probe.UNREAD:
                return False
            if found.get("kind") == body_probe.NO_JSON:
                raise JSONDecodeError(found["message"], "", found["position"])
            raise InvalidArgument(found["message"], field=found["field"], reason=found["reason"])
        return True

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self.child.pid

    def start(self) -> None:
        """Before anybody needs it."""
        self.thread.submit(self.child.start)

    async def _ask(self, question: BodyCheck, spool: Spool) -> bytes:
        """The file stays until it is answered, though who asks may leave before: the process would else find another
        client's body under the same number, and write into that."""
        with ExitStack() as stack:
            path = stack.enter_context(spool.pinned_path())
            asked = self.thread.submit(self.child.ask, replace(question, path=path).encode())
            held = stack.pop_all()
        asked.add_done_callback(lambda _: held.close())
        return await asyncio.wrap_future(asked)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.child.close()
