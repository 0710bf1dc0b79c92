"""Language workers with real cores, and encode workers, that execute their orders when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import Events
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.placement.encode_fleet import EncodeFleet
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.encode_worker import EncodeWorker
from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.shared.columns import i32_bytes
from quire.shared.errors import InvalidArgument, QuireError, Unavailable, to_proto
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.common.v1 import media_pb2, model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.conftest import make_limits, make_sequence

LAYOUT = b"l" * 32
SIZE = 4  # rows of an item
CAPACITY = 10
MAX_LOSSES = 3
BAD_PICTURE = InvalidArgument("media: the picture cannot be encoded", field="media")


def name(letter: str) -> bytes:
    return letter.encode() * 32


def with_items(key: int, letters: str, **fields: object) -> Sequence:
    """A sequence whose prompt has an item for each letter."""
    items = tuple(
        MediaItem(
            name(letter),
            1 + i * SIZE,
            SIZE,
            SIZE,
            MediaSource("frontend:1", media_pb2.MediaItem(identifier=name(letter), num_embeddings=SIZE)),
        )
        for i, letter in enumerate(letters)
    )
    prompt = [key % 90, *range(len(letters) * SIZE + 1)]
    return make_sequence(key, prompt, media=items, payload=Payload(b""), **fields)


class Encoder:
    """An encode worker and its rows."""

    def __init__(self, worker_id: str, epoch: int, layout: bytes = LAYOUT, capacity: int = CAPACITY) -> None:
        hello = pb.WorkerHello(worker_id=worker_id, address=f"{worker_id}:1", role="encode")
        hello.encoder.capacity, hello.encoder.layout = capacity, layout
        self.rows: set[bytes] = set()
        self.orders: deque[bytes] = deque()
        self.capacity = capacity
        self.worker = EncodeWorker(hello, epoch, self._send)

    @property
    def letters(self) -> str:
        """Items that it has been ordered to encode."""
        return "".join(identifier[:1].decode() for identifier in self.orders)

    def _send(self, message: pb.AttachResponse) -> None:
        if message.HasField("release_media"):
            self.rows.remove(message.release_media.identifier)
        else:
            assert not message.prepare_media.HasField("rows")
            self.orders.append(message.prepare_media.item.identifier)
        assert SIZE * (len(self.rows) + len(self.orders)) <= self.capacity


class LanguageWorker:
    """A replica with a real core, and its worker's rows."""

    def __init__(self, worker_id: str, metrics: SchedulerMetrics, layout: bytes = LAYOUT) -> None:
        hello = pb.WorkerHello(worker_id=worker_id, role="both", model=model_pb2.ModelIdentity(vocab_size=100))
        hello.encoder.capacity, hello.encoder.layout = CAPACITY, layout
        hello.limits.max_num_seqs = 8
        limits = make_limits(
            encoder_capacity=CAPACITY, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128
        )
        self.core = Core(limits)
        self.rows: set[bytes] = set()
        self.orders: deque[pb.PrepareMedia] = deque()
        self.events: list[Events] = []
        self.now = 0.0  # seconds of its scheduler's clock
        self.replica = Replica(
            hello,
            1,
            self.core,
            send=self._receive,
            deliver=self.events.append,
            clock=lambda: self.now,
            call_soon=lambda call: None,
            call_later=lambda _, call: None,
            metrics=metrics,
            changes=BlockChanges(),
        )

    @property
    def letters(self) -> str:
        """Items that it has been ordered to prepare, in capitals those that it is to encode itself."""
        found = [(order.item.identifier[:1].decode(), order.HasField("rows")) for order in self.orders]
        return "".join(letter if is_fetched else letter.upper() for letter, is_fetched in found)

    def _receive(self, message: pb.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "prepare_media":
            self.orders.append(message.prepare_media)
        elif kind == "release_media":
            self.rows.discard(message.release_media.identifier)
        elif kind == "plan" and message.plan.admitted:
            for admission in message.plan.admitted:
                assert all(item.identifier in self.rows for item in admission.media), "it has the rows"

    def run(self) -> list[int]:
        """Sends what can be sent, and executes the steps; returns the keys of the sequences in the last one."""
        keys: list[int] = []
        self.replica.pump()
        while self.core.steps_in_flight:
            flight = self.core.steps_in_flight[0]
            keys = flight.keys.tolist()
            tokens = i32_bytes([7] * len(keys))
            self.core_step(flight.step_id, tokens)
        return keys

    def core_step(self, step_id: int, tokens: bytes) -> None:
        """Answers one step, without a pump for the next one."""
        self.replica.pause()
        self.replica.apply_result(pb.StepResult(epoch=1, step_id=step_id, token_ids=tokens))
        self.replica.resume()

    def answer(self, identifier: bytes, error: QuireError | None = None) -> None:
        """Reports an ordered item as prepared."""
        if error is None:
            self.rows.add(identifier)
        wire = None if error is None else to_proto(error)
        self.replica.receive_media_prepared(pb.MediaPrepared(identifier=identifier, error=wire))

    def change_weights(self, update: int) -> None:
        """Swaps the weights, of which nothing is kept."""
        self.core.reset_prefix_cache(preempt_running=True)
        self.rows.clear()
        self.replica.weights = model_pb2.WeightsIdentity(update=update, version=str(update), encoder_update=update)


class EncodeCluster:
    """A fleet with its workers."""

    def __init__(self) -> None:
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.fleet = EncodeFleet(self.metrics, MAX_LOSSES)
        self.encoders: list[Encoder] = []
        self.languages: list[LanguageWorker] = []
        self._epoch = 0

    def add_encoder(self, layout: bytes = LAYOUT, capacity: int = CAPACITY) -> Encoder:
        self._epoch += 1
        encoder = Encoder(f"e{self._epoch}", self._epoch, layout, capacity)
        self.encoders.append(encoder)
        self.fleet.attach(encoder.worker)
        return encoder

    def add_language(self, layout: bytes = LAYOUT) -> LanguageWorker:
        self._epoch += 1
        language = LanguageWorker(f"w{self._epoch}", self.metrics, layout)
        language.replica.media_route = self.fleet
        self.languages.append(language)
        return language

    def lose(self, encoder: Encoder, *, lost: bool = True) -> None:
        self.encoders.remove(encoder)
        self.fleet.detach(encoder.worker, lost=lost)

    def encode(self, encoder: Encoder, error: QuireError | None = None, *, encode_us: int = 0) -> None:
        """Lets an encode worker encode the item that it was ordered first, in `encode_us` microseconds."""
        identifier = encoder.orders.popleft()
        if error is None:
            encoder.rows.add(identifier)
        wire = None if error is None else to_proto(error)
        prepared = pb.MediaPrepared(identifier=identifier, error=wire, encode_us=encode_us)
        self.fleet.receive_prepared(encoder.worker, prepared)

    def prepare(self, language: LanguageWorker, error: QuireError | None = None) -> None:
        """Lets a language worker prepare the item that it was ordered first: fetch it from an encode worker that is
        still attached, or encode it."""
        order = language.orders.popleft()
        identifier = order.item.identifier
        if order.HasField("rows") and error is None:
            sources = [encoder for encoder in self.encoders if encoder.worker.epoch == order.rows.epoch]
            assert all(identifier in encoder.rows for encoder in sources), "rows are kept while they are fetched"
            error = None if sources else Unavailable("the encode worker is gone")
        language.answer(identifier, error)

    def settle(self, until: Callable[[], bool], most: int = 2000) -> None:
        """Lets all workers do all that they can until a condition holds."""
        for _ in range(most):
            if until():
                return
            for encoder in self.encoders:
                while encoder.orders:
                    self.encode(encoder)
            for language in self.languages:
                while language.orders:
                    self.prepare(language)
                language.run()
        raise AssertionError("nothing moves any more")
