"""A worker prepares media over real gRPC, and its answers are those of transformers."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from quire.shared.pb.common.v1 import finish_pb2, media_pb2
from tests.services.worker.attach.test_service import (  # noqa: F401 - fixtures
    SIZES,
    Start,
    finish,
    scheduler,
    start,
)
from tests.services.worker.media.media_server import MediaServer, serving
from tests.services.worker.media.pictures import NUM_ROWS, greedy, identifier_of, make_llava, picture, prompt_with
from tests.services.worker.plans import New, PaperScheduler
from tests.services.worker.scripted_scheduler import ScriptedScheduler
from tests.waiting import eventually


async def test_a_picture_is_fetched_encoded_and_released(
    start: Start,  # noqa: F811
    scheduler: ScriptedScheduler,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = make_llava(tmp_path)
    pixels, other = picture(1), picture(2)
    tokens, media = prompt_with(5, pixels, 3)
    plans = PaperScheduler(SIZES["block_size"], SIZES["num_blocks"])
    worker = start(model=str(tmp_path), encoder_cache_size=NUM_ROWS)
    async with serving(MediaServer(pixels, other)) as address:
        session, hello = await scheduler.attached(epoch=1)
        assert (hello.encoder.capacity, list(hello.encoder.modalities)) == (NUM_ROWS, ["image"])
        prepared = await session.prepare_media(media[0], address)
        assert (prepared.identifier, prepared.HasField("error")) == (identifier_of(pixels), False)
        assert prepared.fetch_us > 0 < prepared.encode_us
        await session.plan(plans.plan([New(0, tokens, media=tuple(media))], {0: len(tokens)}))
        answers = [plans.take(await session.result())[0]]
        for _ in range(3):
            await session.plan(plans.plan())
            answers.append(plans.take(await session.result())[0])
        assert answers == greedy(model, tokens, [pixels], 4)
        _, second = prompt_with(5, other, 3)
        full = await session.prepare_media(second[0], address)
        assert full.error.code == finish_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
        await session.release_media(identifier_of(pixels))
        assert not (await session.prepare_media(second[0], address)).HasField("error")
        await finish(worker, session)


async def test_a_failure_costs_one_item(
    start: Start,  # noqa: F811
    scheduler: ScriptedScheduler,  # noqa: F811
    tmp_path: Path,
) -> None:
    make_llava(tmp_path)
    pixels, large = picture(1), picture(2, side=35)
    worker = start(model=str(tmp_path))
    server = MediaServer(pixels, large)
    async with serving(server) as address:
        session, _ = await scheduler.attached(epoch=1)
        (good,), (unknown,), (wrong,) = (prompt_with(one)[1] for one in (pixels, picture(3), large))
        other_size = media_pb2.MediaItem.FromString(good.SerializeToString())
        other_size.num_embeddings = other_size.length = NUM_ROWS + 1
        failures = [
            (unknown, address, finish_pb2.ERROR_CODE_NOT_FOUND, "no such item"),
            (wrong, address, finish_pb2.ERROR_CODE_INVALID_ARGUMENT, "the tower needs [1, 28, 28, 3]"),
            (other_size, address, finish_pb2.ERROR_CODE_INVALID_ARGUMENT, "the encoder computes 16 rows"),
            (good, "unix:/run/x", finish_pb2.ERROR_CODE_INVALID_ARGUMENT, "is not HOST:PORT"),
            (good, "127.0.0.1:1", finish_pb2.ERROR_CODE_UNAVAILABLE, "the frontend at 127.0.0.1:1"),
        ]
        for item, place, code, words in failures:
            prepared = await session.prepare_media(item, place)
            assert (prepared.identifier, prepared.error.code) == (item.identifier, code)
            assert words in prepared.error.message
        assert not (await session.prepare_media(good, address)).HasField("error")
        _, metrics = await worker.addresses()
        await eventually(lambda: "quire_worker_encoder_cache_rows 16.0" in page(metrics))
        assert 'quire_worker_media_items_total{outcome="failed"} 5.0' in page(metrics)
        session.close()
        session, _ = await scheduler.attached(epoch=2)
        await eventually(lambda: "quire_worker_encoder_cache_rows 0.0" in page(metrics))
        await finish(worker, session)


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return str(answer.read().decode())
