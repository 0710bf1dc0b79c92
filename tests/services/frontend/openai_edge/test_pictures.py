"""Pictures in chat completions: rendered prompt, items, and pixels as workers fetch them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.columns import i32
from quire.shared.kv import block_hash
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.seeing import image, seeing_frontend, shown_prompt, text, user
from tests.services.frontend.media.seeing_folder import NUM_EMBEDDINGS, SIDE, plain, write_seeing_folder

RED = (255, 0, 0)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


async def test_a_picture_of_a_data_url_reaches_the_scheduler_and_its_pixels_a_worker(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        answer = served.ask("/v1/chat/completions", messages=user(text("hello "), image(plain(RED)), text(" world")))
        submission = await served.submission()
        assert shown_prompt(served, submission) == (
            "<|im_start|>user\nhello [picture] world<|im_end|>\n<|im_start|>assistant\n"
        )
        (item,) = submission.media
        assert item.length == item.num_embeddings == NUM_EMBEDDINGS
        assert (item.modality, len(item.identifier), item.embedding_runs) == ("image", 32, b"")
        hashes = block_hash.chain_with_media(submission.root_hash, submission.token_ids, 16, [item])
        assert block_hash.split(submission.block_hashes) == hashes
        head, pixels = await fetch_pixels(served.media_address, item.identifier)
        assert (head.num_tiles, head.height, head.width) == (1, SIDE, SIDE)
        assert pixels == bytes(RED) * SIDE * SIDE
        served.script.resume()
        answered = (await answer).json()
        assert answered["usage"]["prompt_tokens"] == len(i32(submission.token_ids))
        assert served.store.held_bytes == 0
        served.store.check_invariants()
