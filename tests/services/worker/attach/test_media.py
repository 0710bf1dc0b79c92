"""A worker prepares media over real gRPC, and its answers are those of transformers."""

from __future__ import annotations

from pathlib import Path

from quire.shared.pb.common.v1 import finish_pb2
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
