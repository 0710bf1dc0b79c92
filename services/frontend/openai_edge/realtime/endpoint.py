"""ASGI application for /v1/realtime: checks a connection as those of HTTP, then runs its session."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.services.frontend.access.access import Access, Caller
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.http.headers import TENANT
from quire.services.frontend.http.middleware.page_rules import PageRules
from quire.services.frontend.openai_edge import errors
from quire.services.frontend.openai_edge.realtime.events import Event
from quire.services.frontend.openai_edge.realtime.options import OPENAI_RATE, SessionOptions
from quire.services.frontend.openai_edge.realtime.readings import Readings
from quire.services.frontend.openai_edge.realtime.session import RealtimeSession
from quire.services.frontend.openai_edge.routes.transcription_routes import REALTIME
from quire.services.frontend.transcription.transcription import Transcription
from quire.shared.errors import QuireError, ResourceExhausted
from quire.shared.process.supervision import Tasks

KEY_PROTOCOL = "openai-insecure-api-key."  # subprotocol with which browsers send a key
PROTOCOL = "realtime"
NORMAL, POLICY = 1000, 1008  # codes of closing (RFC 6455)
OPENAI_HEADER = "openai-beta"


@dataclass(frozen=True, slots=True)
class RealtimeLimits:
    """Bounds of sessions."""

    sessions: int = 256
    per_client: int = 8  # by tenant of the API key, else by address
    idle_s: float = 120.0  # without a message


class RealtimeSessions:
    """Counts the sessions that are open, by client."""

    def __init__(self, limits: RealtimeLimits) -> None:
        self._limits = limits
        self._of: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return self._of.total()

    @contextmanager
    def held(self, client: str) -> Iterator[None]:
        """Counts a session within the `with`. Raises ResourceExhausted beyond the limits."""
        limits = self._limits
        if self._of[client] >= limits.per_client or self.num_open >= limits.sessions:
            text = (
                f"{REALTIME}: at most {limits.per_client} sessions of a client and {limits.sessions} in all may be "
                "open; close one first"
            )
            raise ResourceExhausted(text)
        self._of[client] += 1
        try:
            yield
        finally:
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]


class RealtimeEndpoint:
    """Serves the sessions of all clients."""

    def __init__(
        self,
        transcription: Transcription,
        catalogue: Catalogue,
        calls: Calls,
        *,
        access: Access,
        rules: PageRules,
        limits: RealtimeLimits | None = None,
    ) -> None:
        """Stores the collaborators. `access`, `rules`: those of HTTP routes."""
        self._transcription, self._catalogue, self._calls = transcription, catalogue, calls
        self._access, self._rules = access, rules
        self._limits = limits or RealtimeLimits()
        self.sessions = RealtimeSessions(self._limits)
        self._readers = Tasks()  # each is cancelled by its session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a connection that is refused with the status and error object that an HTTP call would get."""
        socket = WebSocket(scope, receive, send)
        try:
            self._rules.check("POST", scope["path"], scope["headers"], scope["http_version"])
            caller = self._caller(socket)
            owner = self._owner(socket, caller)
            self._calls.admission.check_open(0, "" if caller is None else caller.tenant)
            first = self._first_options(socket)
            with self.sessions.held(owner):
                self._transcription.num_sessions += 1
                try:
                    await self._serve(socket, caller, first)
                finally:
                    self._transcription.num_sessions -= 1
        except QuireError as error:
            await socket.send_denial_response(errors.as_response(error))

    def _caller(self, socket: WebSocket) -> Caller | None:
        """Returns the caller of the key in the headers, or in a subprotocol. Raises Unauthenticated."""
        headers = [*socket.scope["headers"]]
        key = next((name for name in socket.scope["subprotocols"] if name.startswith(KEY_PROTOCOL)), "")
        if key and "authorization" not in socket.headers:
            headers.append((b"authorization", b"Bearer " + key.removeprefix(KEY_PROTOCOL).encode()))
        return self._access.caller_from_headers(headers)

    @staticmethod
    def _owner(socket: WebSocket, caller: Caller | None) -> str:
        if caller is not None:
            return f"tenant {caller.tenant}"
        return f"address {socket.client.host if socket.client else ''}"

    def _first_options(self, socket: WebSocket) -> SessionOptions:
        """Returns the options that the connection itself states: the model, and OpenAI's form. Raises NotFound for an
        unknown model."""
        asked = socket.query_params
        if model := asked.get("model", ""):
            self._catalogue.check(model)
        is_openai = (
            asked.get("intent") == "transcription"
            or OPENAI_HEADER in socket.headers
            or PROTOCOL in socket.scope["subprotocols"]
        )
        options = SessionOptions(model=model, is_openai=is_openai)
        return SessionOptions(model=model, rate=OPENAI_RATE, is_openai=True) if is_openai else options

    async def _serve(self, socket: WebSocket, caller: Caller | None, first: SessionOptions) -> None:
        """Runs a session until its client leaves, is idle too long, or has had as much sound as a session may have.
        Whatever it has started then ends with it."""
        await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)

        async def send(event: Event) -> None:
            await socket.send_text(orjson.dumps(event).decode())

        readings = Readings(self._transcription, self._calls, caller, socket.headers.get(TENANT, ""))
        session = RealtimeSession(readings, self._catalogue, send, first)
        reader = self._readers.start("realtime session", session.run())
        try:
            await session.begin()
            await self._receive_all(socket, session)
        except (WebSocketDisconnect, RuntimeError):
            pass  # the client has left; Starlette raises RuntimeError for what is sent after that
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _receive_all(self, socket: WebSocket, session: RealtimeSession) -> None:
        """Handles the client's messages, and closes a session that is idle or over."""
        while True:
            try:
                async with asyncio.timeout(self._limits.idle_s):
                    message = await socket.receive_text()
            except TimeoutError:
                await session.fail(f"no event was received for {self._limits.idle_s:g} s", "idle_timeout")
                await socket.close(POLICY, "idle")
                return
            except KeyError:
                await session.fail("messages must be text", "invalid_event")
                continue
            if not await session.receive(message):
                await socket.close(NORMAL, "session expired")
                return
