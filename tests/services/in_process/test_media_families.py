"""Scheduler and worker together answer questions about pictures as transformers does, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.services.in_process.engine_core import EngineCore
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import SchedulerSettings, WorkerSettings
from tests.services.worker.media.families import NUM_TOKENS, Prompt, greedy, prompt, save

BLOCK_SIZE = 4


def engine_of(folder: Path, prompts: list[Prompt], **settings: Any) -> EngineCore:
    """Returns an engine whose steps are shorter than most prompts, and which keeps the pictures of these."""
    kept = {item.identifier: item.pixels for asked in prompts for item in asked.items}
    sizes: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 4, "threads": 1}
    worker = WorkerSettings(model=str(folder), max_num_batched_tokens=24, num_blocks=400, **sizes, **settings)
    return EngineCore(worker, SchedulerSettings(prefix_grain=2), "pictures", 1, kept.__getitem__)


def sequence_of(key: int, asked: Prompt) -> Sequence:
    params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    media = tuple(
        MediaItem(item.identifier, item.offset, item.length, item.num_embeddings, MediaSource("", item))
        for item in asked.media
    )
    tokens, root = i32_bytes(asked.tokens), block_hash.root_hash()
    return Sequence(
        key=key,
        owner=1,
        sequence_id=key,
        tokens=SequenceTokens(tokens),
        num_prompt_tokens=len(asked.tokens),
        max_total_tokens=len(asked.tokens) + NUM_TOKENS,
        root_hash=root,
        block_hashes=block_hash.chain_with_media(root, tokens, BLOCK_SIZE, media),
        media=media,
        payload=Payload(pb.SequenceParams(sampling=params).SerializeToString()),
    )


def answers(engine: EngineCore, prompts: list[Prompt], first: int) -> list[list[int]]:
    """Runs the prompts together; returns the tokens of each."""
    found: dict[int, list[int]] = {first + number: [] for number in range(len(prompts))}
    for number, asked in enumerate(prompts, first):
        engine.add(sequence_of(number, asked))
    num_left = len(prompts)
    while num_left:
        events = engine.step()
        for part in events.tokens:
            for number, token in zip(part.sequence_ids.tolist(), part.token_ids.tolist(), strict=True):
                found[number].append(token)
        assert not [end.failure for end in events.finished if end.failure]
        num_left -= len(events.finished)
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("name", ["gemma3", "gemma3-window", "gemma3-crops", "mistral3", "ministral3", "pixtral"])
def test_chunks_shared_prefixes_and_pictures_beside_text(name: str, tmp_path: Path) -> None:
    """Later prompts begin like earlier ones and have another picture next, in the middle of a block or a picture."""
    checkpoint = save(name, tmp_path)
    first, second = checkpoint.family.sizes[:2]
    earlier = [
        prompt(checkpoint, 7, first, 3, second, 2, first, first, 5, second, 1),
        prompt(checkpoint, 30),
        prompt(checkpoint, second, first, first, 50, second, second, 1),
        prompt(checkpoint, 33, first, 19, second, 14, first, 30, second, 1),
    ]
    later = [
        prompt(checkpoint, 7, first, 3, first, 9),
        prompt(checkpoint, 7, second, 3, second, 2),
        prompt(checkpoint, 7, first, 3, second, 2, first, 1),
        prompt(checkpoint, 30, first, 2),
    ]
    engine = engine_of(tmp_path, earlier + later)
    expected = [greedy(checkpoint, asked) for asked in earlier + later]
    assert answers(engine, earlier, 0) == expected[: len(earlier)]
    assert answers(engine, later, len(earlier)) == expected[len(earlier) :]
