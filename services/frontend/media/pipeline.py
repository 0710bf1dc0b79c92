"""Preparation of the media of prompts: parts of requests become tiles in the store, and their placeholders become the
tokens of the items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from quire.services.frontend.media import expansion, identity, sources
from quire.services.frontend.media.decoder import MediaDecoder
from quire.services.frontend.media.expansion import PlacedItem
from quire.services.frontend.media.fetcher import MediaFetcher
from quire.services.frontend.media.policy import MediaPolicy
from quire.services.frontend.media.store import MediaHolds, MediaStore
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS, MediaOptions, MediaPart, VideoMetadata
from quire.shared.errors import DeadlineExceeded, InvalidArgument, Unimplemented
from quire.shared.media.expansion import joins_of, without_frame
from quire.shared.media.model_processors import MediaProcessors
from quire.shared.media.processor import PromptTokenizer, WholePromptProcessor
from quire.shared.metrics.media import MediaStatus
from quire.shared.pb.common.v1 import media_pb2

if TYPE_CHECKING:
    from quire.shared.media.audio.waveform import F32

MAX_AT_ONCE = 8  # items of one request that are fetched and processed at the same time
LONG_BYTES = 256 * 1024  # more is decoded from base64 and hashed in a thread: 1 MiB takes about a millisecond

P = ParamSpec("P")
T = TypeVar("T")
Placed = tuple[Sequence[int], tuple[media_pb2.MediaItem, ...]]


class MediaUse(NamedTuple):
    """Facts of a request that the preparation of its media depends on."""

    options: MediaOptions = DEFAULT_MEDIA_OPTIONS
    tenant: str = ""
    deadline_s: float | None = None  # on the event loop's clock


class PromptMedia(Protocol):
    """Media of prompts, for the preparation of requests."""

    def check(self, parts: Sequence[MediaPart], options: MediaOptions) -> None:
        """Raises InvalidArgument or Unimplemented for media of a prompt, or options, that the model or the server does
        not accept. Reads and fetches nothing."""

    def holding(self) -> MediaHolds:
        """Returns the holds of one request, to be used in a `with`."""

    async def place(
        self, token_ids: Sequence[int], parts: Sequence[MediaPart], use: MediaUse, holds: MediaHolds
    ) -> Placed:
        """Returns the tokens with the media in the places of their placeholders, and the items. Raises QuireError."""


class NoMedia:
    """PromptMedia of a model, or a server, that takes text only."""

    def __init__(self) -> None:
        self._store = MediaStore(0, 0)

    def check(self, parts: Sequence[MediaPart], options: MediaOptions) -> None:
        """Raises Unimplemented for the first part that is no text, and for options of pictures."""
        for part in parts:
            raise conversation.not_taken(part.origin)
        if options != DEFAULT_MEDIA_OPTIONS:
            name = "mm_processor_kwargs" if options.processor else "media_io_kwargs"
            raise Unimplemented(f"{name}: this model takes no pictures; leave it out", field=name)

    def holding(self) -> MediaHolds:
        return self._store.holding()

    async def place(
        self, token_ids: Sequence[int], parts: Sequence[MediaPart], use: MediaUse, holds: MediaHolds
    ) -> Placed:
        """Returns the tokens as they are; check() has refused all parts."""
        return token_ids, ()


@dataclass(frozen=True, slots=True)
class MediaModel:
    """Model as far as its media are concerned."""

    processors: MediaProcessors
    tokenizer: PromptTokenizer
    placeholders: Mapping[str, str]  # by modality: text of its processor's placeholder
    digest: bytes  # identity.model_digest()


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Numbers of items in one prompt. An absent modality has `most`."""

    most: int = 256
    by_modality: Mapping[str, int] = field(default_factory=dict)

    def check(self, modality: str, num_items: int) -> None:
        """Raises InvalidArgument for more items of a modality than a prompt may have."""
        most = min(self.most, self.by_modality.get(modality, self.most))
        if num_items > most:
            raise InvalidArgument(
                f"At most {most} {modality}(s) may be provided in one prompt."
                + (" Set `--limit-mm-per-prompt` to increase this limit." if most < self.most else "")
                + f" This prompt has {num_items}.",
                field="messages",
            )


class MediaPipeline:
    """PromptMedia of a model that takes media. Owns the processes that decode them."""

    def __init__(
        self,
        model: MediaModel,
        policy: MediaPolicy,
        limits: MediaLimits,
        *,
        store: MediaStore,
        folder: Path,
        num_processes: int,
    ) -> None:
        """Makes the fetcher and the decoder; processes start at the first item."""
        self._model, self._limits, self._bounds = model, limits, policy.bounds
        self.store = store
        self._fetcher = MediaFetcher(policy)
        self._decoder = MediaDecoder(folder, policy.bounds, num_processes)

    def warm_up(self) -> None:
        """Starts one of the processes, so that the first item need not wait for it."""
        self._decoder.start()

    def check(self, parts: Sequence[MediaPart], options: MediaOptions) -> None:
        """Raises Unimplemented for items of a modality that the model does not take, InvalidArgument for too many
        items, or none for an encoder-decoder, and for parts in which the edge found a fault."""
        for part in parts:
            if part.modality not in self.modalities:
                raise conversation.not_taken(part.origin, self.modalities)
        if self._model.processors.attends and len(parts) != 1:
            raise InvalidArgument(
                f"The prompt has {len(parts)} clips, and this model's decoder attends to exactly one. Send one clip "
                "with each prompt.",
                field=parts[0].origin.field if parts else "prompt",
            )
        for modality in self.modalities:
            self._limits.check(modality, sum(part.modality == modality for part in parts))
        for part in parts:
            if part.fault:
                raise InvalidArgument(part.fault, field=part.origin.field)

    @property
    def modalities(self) -> Sequence[str]:
        """Modalities of the items that prompts may have."""
        return self._model.processors.modalities

    @property
    def transcribes(self) -> bool:
        """Whether the model turns one clip into text, so that samples() is of use."""
        return self._model.processors.attends

    @property
    def rate(self) -> int:
        """Samples of sound a second that the model takes."""
        assert self._model.processors.audio is not None
        return self._model.processors.audio.rate

    @property
    def max_samples(self) -> int:
        """Samples of the longest clip that the model takes."""
        assert self._model.processors.audio is not None
        return self._model.processors.audio.max_samples

    async def samples(self, content: bytes) -> F32:
        """Returns the samples of a sound file at the model's rate. Raises InvalidArgument for a file that cannot be
        decoded within the bounds."""
        tiles = await self._decoder.samples(content)
        return np.frombuffer(tiles.pixels, tiles.layout.dtype)

    def holding(self) -> MediaHolds:
        return self.store.holding()

    def status(self) -> MediaStatus:
        """Numbers for the metrics page."""
        return MediaStatus(
            queries=self.store.num_queries,
            hits=self.store.num_hits,
            waiting=self._decoder.num_waiting,
            held_bytes=self.store.held_bytes,
            idle_bytes=self.store.idle_bytes,
        )

    async def place(
        self, token_ids: Sequence[int], parts: Sequence[MediaPart], use: MediaUse, holds: MediaHolds
    ) -> Placed:
        """Fetches, decodes and renders the items, holds them, and puts their tokens in the places of their
        placeholders. Raises InvalidArgument, ResourceExhausted, and DeadlineExceeded at the deadline."""
        if not parts:
            return token_ids, ()
        if self._model.processors.attends:
            async with _deadline(use.deadline_s):
                return token_ids, tuple(map(expansion.attended, await self._items(parts, use, holds)))
        parts = self._in_order(token_ids, parts)
        async with _deadline(use.deadline_s):
            items = await self._items(parts, use, holds)
        return self._expanded(token_ids, items)

    def _expanded(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> Placed:
        """Returns the tokens with those of the items in the places of their placeholders, and the items."""
        pictures, video = self._model.processors.image, self._model.processors.video
        if video is not None and video.around is not None:
            token_ids = without_frame(token_ids, video.placeholder, video.around)
        join = None if pictures is None else joins_of(pictures, self._model.tokenizer)
        covers_prompt = isinstance(pictures, WholePromptProcessor)
        return expansion.expand(list(token_ids), items, join, covers_prompt=covers_prompt)

    def _in_order(self, token_ids: Sequence[int], parts: Sequence[MediaPart]) -> list[MediaPart]:
        """Returns the parts in the order of the placeholders in a prompt: those of one modality keep theirs. Raises
        InvalidArgument unless there are as many placeholders as parts of each modality."""
        modalities: dict[int, str] = {}
        waiting: dict[str, deque[MediaPart]] = {}
        for modality, placeholder in self._model.processors.placeholder_ids.items():
            modalities[placeholder] = modality
            waiting[modality] = deque(part for part in parts if part.modality == modality)
            count, given = list(token_ids).count(placeholder), len(waiting[modality])
            text = self._model.placeholders[modality]
            expansion.check_count(count, given, text, parts[0].origin.field, modality)
        found = (modalities[token] for token in token_ids if token in modalities)
        return [waiting[modality].popleft() for modality in found]

    async def _items(self, parts: Sequence[MediaPart], use: MediaUse, holds: MediaHolds) -> list[PlacedItem]:
        """Returns the items of the parts, some at a time. The first error ends the others."""
        slots, budget = asyncio.Semaphore(MAX_AT_ONCE), _ByteBudget(self._bounds.request_bytes)

        async def item(index: int, part: MediaPart) -> PlacedItem:
            async with slots:
                return await self._item(index, part, use, holds, budget)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(item(index, part)) for index, part in enumerate(parts)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _item(
        self, index: int, part: MediaPart, use: MediaUse, holds: MediaHolds, budget: _ByteBudget
    ) -> PlacedItem:
        """Reads the file of part `index`, or finds the earlier item that it names, and holds the tiles until `holds`
        ends. `budget`: counts the bytes of all files of the request. Raises QuireError."""
        options = use.options
        name = _name(part, use)
        with holds.clock.fetching():
            content = await self._content(part)
        if content is None:
            identifier = self.store.named(name)
            if identifier is None:
                raise InvalidArgument(
                    f"Cache miss for {part.modality} at index {index} but data is not provided. Send it together "
                    "with its name again.",
                    field=part.origin.field,
                )
        else:
            budget.take(len(content))
            identifier = await _in_thread_if_long(content, self._identifier, part, options, content)

        async def make() -> MediaTiles:
            assert content is not None
            return await self._decoder.decode(content, options, part.modality, _metadata(part, options))

        with holds.clock.processing():
            tiles = await holds.hold(identifier, make, name)
        processor = self._model.processors.by_modality[part.modality]
        expanded = processor.expand(tiles.layout, self._model.tokenizer)
        return PlacedItem(identifier, tiles, expanded, processor.placeholder, part.modality)

    def _identifier(self, part: MediaPart, options: MediaOptions, content: bytes) -> bytes:
        """Returns the identifier of a part's item. `content`: its file."""
        return identity.identifier(self._model.digest, options, content, part.modality, _metadata(part, options))

    async def _content(self, part: MediaPart) -> bytes | None:
        """Returns the bytes of a part's file; None if the part only names an earlier item. Raises
        InvalidArgument."""
        if part.content is not None:
            return await self._fetcher.read(sources.InlineData(part.content, ""))
        if part.url is None:
            return None
        source = await _in_thread_if_long(part.url, sources.parse, part.url)
        return await self._fetcher.read(source)

    async def close(self) -> None:
        self._decoder.close()
        await self._fetcher.close()
        await self.store.close()


class _ByteBudget:
    """Bytes of all files of one request."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, num_bytes: int) -> None:
        """Counts the bytes of one file. Raises InvalidArgument if there are too many."""
        self._left -= num_bytes
        if self._left < 0:
            raise InvalidArgument(
                f"Maximum file size exceeded: the media of a request have at most {self._most >> 20} MiB together. "
                "Send fewer or smaller ones.",
                field="messages",
            )


def _metadata(part: MediaPart, options: MediaOptions) -> VideoMetadata:
    """Returns what the client said about the frames of a part: with the part, or for all of its request."""
    return part.metadata or options.metadata


def _name(part: MediaPart, use: MediaUse) -> bytes:
    """Returns the key of the client's name of a part; empty without one. Names are those of a tenant, and of one way
    of processing."""
    if not part.name:
        return b""
    how = identity.options_key(use.options, part.modality, _metadata(part, use.options))
    return repr((use.tenant, part.name, how)).encode()


async def _in_thread_if_long(given: str | bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns work(*args, **kwargs), run in a thread if `given` is longer than LONG_BYTES."""
    if len(given) <= LONG_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


@asynccontextmanager
async def _deadline(deadline_s: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded if its body lasts beyond the deadline, on the event loop's clock."""
    try:
        async with asyncio.timeout_at(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed while the media were fetched and decoded") from None
