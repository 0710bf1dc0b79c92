"""An engine without services encodes the pictures of its own store, and answers as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quire.services.frontend.media.store import MediaStore
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.in_process.engine_core import EngineCore
from quire.services.in_process.pixels import StorePixels
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.services.worker.step.fetched_item import Pixels
from quire.shared.columns import i32_bytes
from quire.shared.errors import NotFound
from quire.shared.kv.block_hash import root_hash
from quire.shared.media.processor import TileLayout
from quire.shared.pb.common.v1 import media_pb2, sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import SchedulerSettings, WorkerSettings
from tests.services.worker.media.pictures import greedy, identifier_of, make_llava, picture, prompt_with

NUM_TOKENS = 6


def engine_of(folder: Path, pictures: list[Pixels]) -> EngineCore:
    kept = {identifier_of(one): one for one in pictures}

    def fetch(identifier: bytes) -> Pixels:
        if identifier not in kept:
            raise NotFound("it is not kept any more")
        return kept[identifier]

    sizes: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "max_num_seqs": 4, "threads": 1}
    worker = WorkerSettings(model=str(folder), max_num_batched_tokens=24, **sizes)
    return EngineCore(worker, SchedulerSettings(), "llava", 1, fetch)


def sequence_of(key: int, tokens: list[int], media: list[media_pb2.MediaItem]) -> Sequence:
    params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    return Sequence(
        key=key,
        owner=1,
        sequence_id=key,
        tokens=SequenceTokens(i32_bytes(tokens)),
        num_prompt_tokens=len(tokens),
        max_total_tokens=len(tokens) + NUM_TOKENS,
        root_hash=root_hash(),
        media=tuple(
            MediaItem(item.identifier, item.offset, item.length, item.num_embeddings, MediaSource("", item))
            for item in media
        ),
        payload=Payload(pb.SequenceParams(sampling=params).SerializeToString()),
    )


def test_answers_are_those_of_transformers_and_a_lost_picture_costs_its_request(tmp_path: Path) -> None:
    model = make_llava(tmp_path)
    pictures = [picture(1), picture(2)]
    engine = engine_of(tmp_path, pictures)
    prompts = [(5, pictures[0], 3, pictures[1], 2), (9,), (pictures[1], 6), (2, picture(3), 1)]
    answers: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for number, parts in enumerate(prompts):
        engine.add(sequence_of(number, *prompt_with(*parts)))
    ends = {}
    while len(ends) < len(prompts):
        events = engine.step()
        for part in events.tokens:
            for number, token in zip(part.sequence_ids.tolist(), part.token_ids.tolist(), strict=True):
                answers[number].append(token)
        ends |= {end.sequence.sequence_id: end.failure for end in events.finished}
    for number, parts in enumerate(prompts[:3]):
        seen = [part for part in parts if not isinstance(part, int)]
        assert answers[number] == greedy(model, prompt_with(*parts)[0], seen, NUM_TOKENS), number
    assert ends[3] is not None
    assert ends[3].message == "it is not kept any more"


async def test_the_store_hands_its_pixels_over() -> None:
    store, pixels = MediaStore(1 << 20, 1 << 20), picture(4)

    async def make() -> MediaTiles:
        return MediaTiles(TileLayout(*pixels.shape[:3]), pixels.tobytes())

    with store.holding() as holds:
        await holds.hold(identifier_of(pixels), make)
        assert np.array_equal(await StorePixels(store).fetch(identifier_of(pixels), ""), pixels)
