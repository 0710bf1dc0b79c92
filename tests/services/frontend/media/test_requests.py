"""Lives of requests with pictures: lost schedulers, deadlines, clients that leave, several prompts and samples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.shared.kv import block_hash
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.media_server import answer, media_server, silent
from tests.services.frontend.media.seeing import asked_prompt, image, pixels_of, seeing_frontend, text, user
from tests.services.frontend.media.seeing_folder import NUM_EMBEDDINGS, plain, write_seeing_folder
from tests.waiting import eventually

RED, GREEN = (255, 0, 0), (0, 255, 0)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


async def test_a_sequence_that_lost_its_scheduler_takes_its_pictures_along(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        served.script.resume()
        served.script.step_s = 0.01
        asked = served.ask(CHAT, messages=user(text("tell me"), image(plain(RED))), max_tokens=40)
        await served.script.until(lambda: served.script.most_outputs >= 18)
        served.script.pause()
        served.script.break_sessions()
        again = await served.submission(1)
        first = served.script.submissions[0]
        assert len(again.token_ids) > len(first.token_ids)
        assert list(again.media) == list(first.media)
        hashes = block_hash.chain_with_media(again.root_hash, again.token_ids, 16, again.media)
        assert block_hash.split(again.block_hashes) == hashes
        assert (await pixels_of(served, again))[0][:3] == bytes(RED)
        served.script.resume()
        assert (await asked).status_code == 200
        assert served.store.held_bytes == 0


async def test_the_deadline_covers_a_server_that_sends_nothing(seeing: Path) -> None:
    async with media_server({"/slow.png": silent}) as media:
        settings: dict[str, Any] = {
            "allowed_media_domains": ("127.0.0.1",),
            "allowed_media_networks": ("127.0.0.0/8",),
        }
        async with seeing_frontend(seeing, **settings) as served:
            part = {"type": "image_url", "image_url": {"url": media.url("/slow.png")}}
            body = {"messages": user(part, image(plain(RED))), "max_tokens": 1}
            late = await served.started.http.post(CHAT, json=body, headers={"x-request-timeout": "0.3"})
            assert late.status_code == 504, late.text
            assert "while the media were fetched and decoded" in late.text
            assert not served.script.submissions
            await served.started.until_idle()
            assert served.store.held_bytes == 0
            served.store.check_invariants()


async def test_a_client_that_leaves_releases_its_pictures(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        body = {"messages": user(image(plain(RED))), "max_tokens": 5, "stream": True}
        async with httpx.AsyncClient(base_url=served.started.url) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json=body))
            submission = await served.submission()
            assert served.store.held_bytes
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: served.store.held_bytes == 0)
        _, pixels = await fetch_pixels(served.media_address, submission.media[0].identifier)
        assert pixels[:3] == bytes(RED)  # still there for the next request
        served.store.check_invariants()


async def test_samples_share_the_pictures_of_their_prompt_and_conversations_have_their_own(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        asked = served.ask(CHAT, messages=user(image(plain(RED))), n=3)
        submission = await served.submission(0, asked)
        assert (submission.num_sequences, len(submission.media)) == (3, 1)
        served.script.resume()
        await asked
        served.script.pause()
        conversations = [user(image(plain(RED))), user(text("x")), user(image(plain(GREEN)), image(plain(RED)))]
        asked = served.ask("/v1/chat/completions/batch", messages=conversations)
        await served.submission(3, asked)
        assert [len(submission.media) for submission in served.script.submissions[1:]] == [1, 0, 2]
        served.script.resume()
        await asked


async def test_a_thousand_pictures_leave_memory_bounded(seeing: Path) -> None:
    """One request after the other, as vllm#12973 reports of host memory that grows."""
    async with seeing_frontend(seeing, mm_processor_cache_gb=1e-5) as served:
        served.script.resume()
        bound = int(1e-5 * (1 << 30))
        for number in range(40):
            pictures = [image(plain((number, other, 9))) for other in range(25)]
            answered = await served.ask(CHAT, messages=user(*pictures))
            assert answered.status_code == 200, answered.text
            assert served.store.idle_bytes <= bound
        metrics = await served.started.metrics()
        assert metrics["vllm:mm_cache_queries_total"] == 1000
        assert metrics["quire_frontend_media_bytes{state=held}"] == 0
        assert metrics["quire_frontend_media_waiting"] == 0


async def test_a_prompt_that_its_pictures_make_too_long_is_refused(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        pictures = [image(plain(RED))] * (512 // NUM_EMBEDDINGS)
        status, said = await served.refusal(CHAT, messages=user(*pictures))
        assert status == 400
        assert "maximum context length is 512 tokens" in json.loads(said)["error"]["message"]
        assert json.loads(said)["error"]["code"] in (400, "context_length_exceeded")
        assert served.store.held_bytes == 0


async def test_a_large_file_is_decoded_and_a_larger_one_refused_by_size(seeing: Path) -> None:
    """Screenshots of several megabytes in base64, vllm#28123."""
    import numpy as np
    from PIL import Image

    from tests.services.frontend.media.seeing_folder import png

    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (1400, 1400, 3), dtype=np.uint8))
    async with seeing_frontend(seeing) as served:
        shown, _ = await asked_prompt(served, CHAT, messages=user(text("see"), image(png(noise))))
        assert shown.count("[picture]") == 1
        huge = await served.started.http.post(CHAT, json={"messages": user(image(bytes(13 << 20)))})
        assert huge.status_code == 413


async def test_fetched_pictures_are_fetched_again_but_decoded_once(seeing: Path) -> None:
    async with media_server({"/p.png": answer(plain(GREEN))}) as media:
        settings: dict[str, Any] = {"allowed_media_domains": ("*",), "allowed_media_networks": ("127.0.0.0/8",)}
        async with seeing_frontend(seeing, **settings) as served:
            part = {"type": "image_url", "image_url": {"url": media.url("/p.png")}}
            for _ in range(2):
                _, colours = await asked_prompt(served, CHAT, messages=user(part))
                assert colours == [bytes(GREEN)]
            assert len(media.asked) == 2
            assert (served.store.num_queries, served.store.num_hits) == (2, 1)
