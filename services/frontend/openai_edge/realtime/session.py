"""One realtime session: events of the client in, events of the server out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.openai_edge.realtime import events, options
from quire.services.frontend.openai_edge.realtime.events import Event, EventError, OpenAiEvents, SpokenItem, VllmEvents
from quire.services.frontend.openai_edge.realtime.options import SessionOptions
from quire.services.frontend.openai_edge.realtime.readings import Readings
from quire.services.frontend.transcription.live import LiveUtterance
from quire.shared.errors import NotFound, QuireError
from quire.shared.logs import logger

log = logger("realtime")

MOST_WAITING = 8  # utterances that have ended and are not read to the end
MOST_S = 7200.0  # of sound in one session
LOOK_S = 0.1  # of sound, between two looks for silence
NOT_VALIDATED = "Model not validated. Make sure to validate the model by sending a session.update event."


class RealtimeSession:
    """State of one connection. `run()` reads the utterances in order; receive() takes the client's messages."""

    def __init__(
        self,
        readings: Readings,
        catalogue: Catalogue,
        send: Callable[[Event], Awaitable[None]],
        first: SessionOptions,
    ) -> None:
        """Stores the collaborators. `first`: options before any session.update; with a model, it is known to exist."""
        self._readings, self._catalogue, self._send = readings, catalogue, send
        self._id = events.new_id("sess")
        self._options, self._is_validated = first, bool(first.model)
        self._live: tuple[SpokenItem, LiveUtterance] | None = None  # that sound is appended to
        self._utterances: asyncio.Queue[tuple[SpokenItem, LiveUtterance]] = asyncio.Queue(MOST_WAITING)
        self._last_id: str | None = None
        self._seconds = 0.0
        self._looked_s = 0.0  # of the utterance that is spoken, when silence was last looked for

    async def begin(self) -> None:
        """Sends the event session.created, with the options of the session."""
        await self._send(events.session_event("created", self._id, self._options.shown()))

    async def receive(self, message: str) -> bool:
        """Handles a message; an event that is refused is answered by an error event. Returns whether the session
        continues: it ends when it has had MOST_S of sound."""
        event_id: str | None = None
        try:
            event = events.parse(message)
            event_id = str(event.get("event_id") or "") or None
            await self._handle(event)
        except EventError as error:
            await self._send(self._form.error(error, event_id))
        if self._seconds <= MOST_S:
            return True
        text = f"the session has had {MOST_S:g} s of sound; open another one"
        await self._send(self._form.error(EventError("session_expired", text), event_id))
        return False

    async def run(self) -> None:
        """Reads the utterances one after the other and sends their text, until it is cancelled."""
        while True:
            item, utterance = await self._utterances.get()
            try:
                async for delta in utterance.deltas():
                    await self._send(self._form.delta(item, delta))
                await self._send(self._form.completed(item, utterance.text, utterance.seconds))
            except QuireError as error:
                await self.fail(error.message)
                self._abandon(item)
            except Exception:
                log.exception("reading failed", session=self._id)
                await self.fail("internal error")
                self._abandon(item)

    async def fail(self, message: str, code: str = "processing_error") -> None:
        """Sends an error event that no event of the client has caused."""
        await self._send(self._form.error(EventError(code, message), None))

    @property
    def _form(self) -> events.ServerEvents:
        return OpenAiEvents() if self._options.is_openai else VllmEvents()

    async def _handle(self, event: Event) -> None:
        """Handles an event of a known type. Raises EventError."""
        match event["type"]:
            case "session.update" | "transcription_session.update":
                await self._update(event)
            case "input_audio_buffer.append":
                await self._append(events.sound_of(event))
            case "input_audio_buffer.commit":
                await self._commit(is_final=self._options.is_openai or bool(event.get("final")))
            case "input_audio_buffer.clear":
                self._clear()
                await self._send({"type": "input_audio_buffer.cleared", "event_id": events.new_id("event")})

    async def _update(self, event: Event) -> None:
        """Checks and takes new options, which are those of the utterances from then on."""
        found = options.updated(self._options, event)
        try:
            self._catalogue.check(found.model)
            self._readings.check(found)
        except NotFound as error:
            raise EventError("model_not_found", error.message, "model") from None
        except QuireError as error:
            raise EventError("invalid_event", error.message, error.field) from None
        self._options = replace(found, model=found.model or self._catalogue.name)
        self._is_validated = True
        await self._send(events.session_event("updated", self._id, self._options.shown()))

    async def _append(self, sound: bytes) -> None:
        """Adds sound to the utterance that is spoken; the first one begins it. Waits while too much is to be read."""
        if not self._is_validated:
            raise EventError("model_not_validated", NOT_VALIDATED)
        if self._live is None:
            item = SpokenItem(events.new_id("item"), self._last_id)
            self._live = item, self._readings.utterance(self._options)
            self._last_id, self._looked_s = item.id, 0.0
            await self._utterances.put(self._live)
        item, utterance = self._live
        await utterance.append(sound)
        self._seconds += len(sound) / (2 * self._options.rate)
        if self._options.silence_s and self._is_over(utterance):
            await self._commit(is_final=True)

    def _is_over(self, utterance: LiveUtterance) -> bool:
        """Returns whether the speaker has fallen silent; looks again after LOOK_S of sound."""
        if utterance.seconds - self._looked_s < LOOK_S:
            return False
        self._looked_s = utterance.seconds
        return utterance.has_fallen_silent(self._options.silence_s)

    async def _commit(self, *, is_final: bool) -> None:
        """Ends the utterance that is spoken. In vLLM's form a commit that is not final only starts the reading, which
        has begun with the first sound. Raises EventError without sound."""
        if not self._is_validated:
            raise EventError("model_not_validated", NOT_VALIDATED)
        if self._live is None:
            if self._options.is_openai or is_final:
                raise EventError("invalid_event", "the input audio buffer is empty; append sound before the commit")
            return
        if not is_final:
            return
        item, utterance = self._live
        self._live = None
        utterance.end()
        for event in self._form.committed(item):
            await self._send(event)

    def _clear(self) -> None:
        """Drops the utterance that is spoken: what is read of it so far is its text."""
        if self._live is not None:
            self._live[1].end()
            self._live = None

    def _abandon(self, item: SpokenItem) -> None:
        """Lets the next sound begin another utterance, if the one that failed is still spoken."""
        if self._live is not None and self._live[0] is item:
            self._live = None
