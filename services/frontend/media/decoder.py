"""Processes that decode and render media, so that a hostile file costs neither the event loop nor the frontend's
memory."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from quire.services.frontend.media import decoder_process
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS, NO_METADATA, MediaOptions, VideoMetadata
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.media.modalities import IMAGE
from quire.shared.process.child import Child, ChildEnded

ATTEMPTS = 2  # of one item: a process can be killed for reasons that are not the item
SLACK = 3.0  # elapsed seconds that are allowed for a second of processor time, on a busy machine


class MediaDecoder:
    """Decodes media in a fixed number of processes, started when they are first needed; callers wait for a free
    one."""

    def __init__(self, folder: Path, bounds: MediaBounds, num_processes: int) -> None:
        """Makes the processes' owners. `folder`: the model's, whose processor the processes use."""
        self._bounds = bounds
        self._children = [
            Child(decoder_process.__name__, decoder_process.introduction(bounds, folder)) for _ in range(num_processes)
        ]
        self._free: asyncio.LifoQueue[Child] = asyncio.LifoQueue()  # one that has run is ready at once
        for child in self._children:
            self._free.put_nowait(child)
        self._threads = ThreadPoolExecutor(num_processes, "media")
        self._num_waiting = 0

    def start(self) -> Future[None]:
        """Starts a free process in the background, so that the first item does not wait for its imports. Returns the
        end of that."""
        loop, child = asyncio.get_running_loop(), self._free.get_nowait()

        def start_quietly() -> None:
            """Starts the process; an error is reported when an item needs it."""
            with contextlib.suppress(Internal):
                child.start()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._free.put_nowait, child)

        return self._threads.submit(start_quietly)

    @property
    def num_waiting(self) -> int:
        """Items that wait for a process or are being decoded."""
        return self._num_waiting

    async def decode(
        self,
        content: bytes,
        options: MediaOptions = DEFAULT_MEDIA_OPTIONS,
        modality: str = IMAGE,
        metadata: VideoMetadata = NO_METADATA,
    ) -> MediaTiles:
        """Waits for a free process and returns the tiles of the item in the file `content`. `metadata`: of a video that
        is sent as frames. Raises InvalidArgument for a file of another kind or that cannot be decoded within the
        bounds, and for options that the model's processor does not have."""
        self._num_waiting += 1
        child: Child | None = None
        try:
            child = await self._free.get()
            question = decoder_process.question(content, options, modality, metadata)
            return await asyncio.shield(self._started(child, question, modality))
        finally:
            self._num_waiting -= 1

    async def samples(self, content: bytes) -> MediaTiles:
        """Waits for a free process and returns the samples of a sound file at the model's rate, as one row of float32.
        Raises InvalidArgument as decode()."""
        return await self.decode(content, modality=decoder_process.SAMPLES)

    def _started(self, child: Child, question: bytes, modality: str) -> asyncio.Future[MediaTiles]:
        """Has `child` decode in a thread and returns the future tiles; the child is free again when it has answered,
        also where the caller has left."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, self._ask, child, question, modality)

        def release(done: asyncio.Future[MediaTiles]) -> None:
            self._free.put_nowait(child)
            if not done.cancelled():
                done.exception()  # the caller may have left: nothing else asks for it

        future.add_done_callback(release)
        return future

    def _ask(self, child: Child, question: bytes, modality: str) -> MediaTiles:
        """Returns the tiles that `child` renders; blocks. A process that ended is started again, up to ATTEMPTS
        times. Raises InvalidArgument for an item that exceeds processor time or memory."""
        longest = decoder_process.decode_time(self._bounds, modality) * SLACK + 1.0
        for _ in range(ATTEMPTS):
            try:
                return decoder_process.decode(child.ask(question, longest))
            except ChildEnded as ended:
                if ended.status in (None, -signal.SIGXCPU):
                    raise InvalidArgument(decoder_process.over_time(self._bounds, modality), field="messages") from None
        raise InvalidArgument(decoder_process.over_memory(self._bounds, modality), field="messages")

    @property
    def pids(self) -> list[int]:
        """Process ids of those that run."""
        return [child.pid for child in self._children if child.pid is not None]

    def close(self) -> None:
        """Ends the processes; pictures that wait for one are abandoned."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
