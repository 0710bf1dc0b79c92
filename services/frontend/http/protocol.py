"""uvicorn's protocol with a door in front: while there is no room, calls for work are answered from their headers.

A call that is refused here costs no task, no scope and no second turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.frontend.http.headers import Headers

Refuse = Callable[[bytes, bytes, Headers], bytes | None]  # method, target, headers -> a whole answer, None to let it in


class _Refused:
    """In the place of a cycle whose answer is complete: what else comes of its request is dropped."""

    response_complete = True
    message_event = asyncio.Event()


REFUSED = cast(RequestResponseCycle, _Refused())


def guarded(refuse: Refuse) -> type[asyncio.Protocol]:
    """The protocol for a server whose door is `refuse`."""

    class Guarded(HttpToolsProtocol):
        """One connection."""

        cycle: RequestResponseCycle | None
        timeout_keep_alive_task: asyncio.TimerHandle | None

        def on_headers_complete(self) -> None:
            is_free = self.cycle is None or self.cycle.response_complete
            answer = refuse(self.parser.get_method(), self.url, self.headers) if is_free else None
            if answer is None:
                super().on_headers_complete()
                return
            self.cycle = REFUSED
            self.transport.write(answer)
            if self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive():
                self.transport.close()
            self.on_response_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if self.cycle is REFUSED and self.timeout_keep_alive_task is None and not self.transport.is_closing():
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    return Guarded


def whole(response: Response) -> bytes:
    """As it is written."""
    status = HTTPStatus(response.status_code)
    head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + bytes(response.body)
