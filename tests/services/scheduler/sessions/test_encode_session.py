"""Sessions of encode workers: what they say is checked, and their items are prepared again however a session ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire.services.scheduler.replicas.encode_worker import EncodeWorker
from quire.services.scheduler.sessions.encode_session import EncodeTiming
from quire.shared.errors import InvalidArgument, QuireError, to_proto
from quire.shared.pb.common.v1 import media_pb2, model_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.scripted_peers import MODEL
from tests.services.scheduler.sessions.test_worker_service import HELLO, OWNER, Aborted, FakeCall, SessionHarness, until

LAYOUT, NAME = b"l" * 32, b"i" * 32
NUM_ROWS = 4


def encode_hello(**changes: object) -> pb.WorkerHello:
    hello = pb.WorkerHello(worker_id="e0", address="e0:1", role="encode", model=MODEL)
    hello.encoder.capacity, hello.encoder.layout = 100, LAYOUT
    for name, value in changes.items():
        if isinstance(value, model_pb2.ModelIdentity):
            hello.model.CopyFrom(value)
        elif name in ("capacity", "layout"):
            setattr(hello.encoder, name, value)
        else:
            setattr(hello, name, value)
    return hello


def language_hello() -> pb.WorkerHello:
    hello = pb.WorkerHello()
    hello.CopyFrom(HELLO)
    hello.encoder.capacity, hello.encoder.layout = 100, LAYOUT
    return hello


class EncodeHarness(SessionHarness):
    """A scheduler with a language worker and an encode worker."""

    async def attach(self) -> tuple[FakeCall, FakeCall]:
        """Attaches both and submits a sequence with a picture; returns their calls once it is ordered."""
        language, encoder = FakeCall(self.service, language_hello()), FakeCall(self.service, encode_hello())
        await until(lambda: bool(self.cluster.replicas and self.cluster.encoders.workers))
        submission = scheduler_pb2.Submission(
            first_sequence_id=1,
            num_sequences=1,
            token_ids=bytes(4 * 8),
            num_prompt_tokens=8,
            root_hash=bytes(32),
            max_tokens=4,
            media=[
                media_pb2.MediaItem(
                    identifier=NAME, offset=1, length=NUM_ROWS, num_embeddings=NUM_ROWS, modality="image"
                )
            ],
        )
        for _ in self.cluster.submit(OWNER, submission):
            pass
        await until(lambda: bool(orders(encoder)))
        assert not orders(language)
        return language, encoder

    @property
    def encoder(self) -> EncodeWorker:
        return self.cluster.encoders.workers["e0"]


def orders(call: FakeCall) -> list[pb.PrepareMedia]:
    return [message.prepare_media for message in call.ordered if message.HasField("prepare_media")]


def prepared() -> pb.AttachRequest:
    return pb.AttachRequest(media_prepared=pb.MediaPrepared(identifier=NAME))


async def ended(*calls: FakeCall) -> None:
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)


async def test_rows_are_fetched_from_the_address_in_the_hello() -> None:
    desk = EncodeHarness()
    language, encoder = await desk.attach()
    encoder.tell(prepared())
    await until(lambda: bool(orders(language)))
    (order,) = orders(language)
    assert (order.rows.worker_id, order.rows.address, order.rows.epoch) == ("e0", "e0:1", desk.encoder.epoch)
    language.tell(prepared())
    await until(lambda: language.has_plan)
    assert desk.cluster.encoders.num_fetching == 0
    await ended(language, encoder)


async def hang_up(call: FakeCall, _desk: EncodeHarness) -> None:
    call.hang_up()
    await call.task


async def cancelled(call: FakeCall, _desk: EncodeHarness) -> None:
    await ended(call)


async def wrong_answer(call: FakeCall, _desk: EncodeHarness) -> None:
    call.tell(pb.AttachRequest(media_prepared=pb.MediaPrepared(identifier=b"x" * 32)))
    with pytest.raises(Aborted, match="awaits no media item"):
        await call.task


async def another_process(call: FakeCall, desk: EncodeHarness) -> None:
    desk.later = FakeCall(desk.service, encode_hello())
    with pytest.raises(Aborted, match="attached again"):
        await call.task


@pytest.mark.parametrize("end", [hang_up, cancelled, wrong_answer, another_process])
async def test_items_of_an_ended_session_are_prepared_again(end: Callable[..., object]) -> None:
    desk = EncodeHarness()
    language, encoder = await desk.attach()
    await end(encoder, desk)  # type: ignore[misc]
    await until(lambda: bool(orders(language)))
    assert not orders(language)[0].HasField("rows")
    language.tell(prepared())
    await until(lambda: language.has_plan)
    await ended(language, *([desk.later] if desk.later else []))


async def test_a_leaving_worker_stays_until_its_rows_are_fetched() -> None:
    desk = EncodeHarness()
    language, encoder = await desk.attach()
    encoder.tell(pb.AttachRequest(leaving=pb.Leaving()))
    await until(lambda: desk.encoder.leaving)
    encoder.tell(prepared())
    await until(lambda: bool(orders(language)))
    assert not encoder.task.done()
    language.tell(prepared())
    await encoder.task
    assert not desk.cluster.encoders.workers
    await ended(language)


async def test_an_idle_worker_leaves_at_once() -> None:
    desk = EncodeHarness()
    encoder = FakeCall(desk.service, encode_hello())
    await until(lambda: bool(desk.cluster.encoders.workers))
    encoder.tell(pb.AttachRequest(leaving=pb.Leaving()))
    await encoder.task
    assert not desk.cluster.encoders.workers


async def test_a_worker_that_does_not_answer_is_lost() -> None:
    desk = EncodeHarness(encode_timing=EncodeTiming(check_s=0.01, fetch_s=-30.0))
    language, encoder = await desk.attach()
    await encoder.task
    assert not desk.cluster.encoders.workers
    await until(lambda: bool(orders(language)))  # it encodes by itself
    await ended(language)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("capacity", 0, "encoder.capacity: worker e0 has 0, needs 1 to"),
        ("capacity", 1 << 25, "encoder.capacity: worker e0 has 33554432"),
        ("layout", b"short", "encoder.layout: worker e0 sent 5 bytes"),
        ("address", "", "address: '' "),
        ("worker_id", "e" * 300, "worker_id"),
        ("model", model_pb2.ModelIdentity(name="other", fingerprint="01", vocab_size=MODEL.vocab_size), "model"),
        ("model", model_pb2.ModelIdentity(name="paper", fingerprint="00"), "model.vocab_size"),
    ],
)
async def test_impossible_values_are_refused_by_name(field: str, value: object, text: str) -> None:
    desk = EncodeHarness()
    language = FakeCall(desk.service, language_hello())
    await until(lambda: bool(desk.cluster.replicas))
    with pytest.raises(Aborted, match=text):
        await FakeCall(desk.service, encode_hello(**{field: value})).task
    assert not desk.cluster.encoders.workers
    await ended(language)


def device_orders(call: FakeCall) -> list[pb.DeviceOrder]:
    return [message.device_order for message in call.ordered if message.HasField("device_order")]


def target(update: int, path: str, encoder_update: int) -> model_pb2.WeightsIdentity:
    return model_pb2.WeightsIdentity(update=update, version=str(update), path=path, encoder_update=encoder_update)


async def answer_orders(call: FakeCall, count: int, error: QuireError | None = None) -> None:
    """Waits until the worker has had so many orders in all, and answers the last one."""
    await until(lambda: len(device_orders(call)) == count)
    done = pb.DeviceOrderDone(order_id=device_orders(call)[-1].order_id)
    if error is not None:
        done.error.CopyFrom(to_proto(error))
    call.tell(pb.AttachRequest(device_order_done=done))


async def test_an_update_from_a_folder_is_loaded_when_no_worker_needs_the_rows() -> None:
    desk = EncodeHarness()
    language, encoder = await desk.attach()
    wanted = target(7, "/weights/new", 7)
    desk.cluster.target_state.weights = wanted
    encoder.tell(prepared())
    await until(lambda: bool(orders(language)))
    assert not device_orders(encoder), "a worker still fetches rows"
    language.tell(prepared())
    await answer_orders(encoder, 1)
    assert device_orders(encoder)[0].stage_weights.weights == wanted
    assert [m.release_media.identifier for m in encoder.ordered if m.HasField("release_media")] == [NAME]
    await answer_orders(encoder, 2)
    assert device_orders(encoder)[1].swap_weights.update == 7
    await until(lambda: desk.encoder.weights == wanted)
    await ended(language, encoder)


async def test_a_broadcast_leaves_encode_workers_as_they_are() -> None:
    desk = EncodeHarness()
    language, encoder = await desk.attach()
    (replica,) = desk.cluster.replicas.values()
    desk.cluster.target_state.weights = replica.weights = target(7, "", 0)
    assert not desk.encoder.is_outdated(desk.cluster.target_state.weights)
    assert desk.encoder.weights.encoder_update == replica.weights.encoder_update
    assert not device_orders(encoder)
    await ended(language, encoder)


async def test_weights_that_it_cannot_load_are_tried_once() -> None:
    desk = EncodeHarness()
    language, encoder = await desk.attach()
    encoder.tell(prepared())
    await until(lambda: bool(orders(language)))
    language.tell(prepared())
    desk.cluster.target_state.weights = target(7, "/weights/absent", 7)
    await answer_orders(encoder, 1, InvalidArgument("model: /weights/absent does not exist"))
    later = target(8, "/weights/new", 8)
    desk.cluster.target_state.weights = later
    await answer_orders(encoder, 2)
    assert device_orders(encoder)[1].stage_weights.weights == later, "the next update is tried"
    await ended(language, encoder)
