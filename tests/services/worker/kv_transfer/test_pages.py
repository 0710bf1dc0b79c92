"""Blocks of one replica used by another: results equal those of computing them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.kv_transfer.layout import layout_of
from quire.services.worker.kv_transfer.pages import Pages
from quire.services.worker.models.loading import weight_samples
from quire.shared.columns import i32_bytes
from quire.shared.errors import FailedPrecondition
from quire.shared.kv.block_hash import chain, root_hash
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
SIZE = 4
NUM_FULL = len(PROMPT) // SIZE
FULL = BlockShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LATENT = BlockShape(num_layers=3, block_size=4, num_kv_heads=1, head_dim=20, dtype=torch.bfloat16, num_parts=1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def hashes() -> list[bytes]:
    return chain(root_hash(), i32_bytes(PROMPT), SIZE)


@pytest.mark.parametrize("shape", [FULL, LATENT], ids=["full", "latent"])
@pytest.mark.parametrize("there", DEVICES)
@pytest.mark.parametrize("here", DEVICES)
def test_pages_are_equal_for_contiguous_and_separate_memory(here: str, there: str, shape: BlockShape) -> None:
    giving, taking = (kv_cache.allocate(shape, 20, torch.device(device)) for device in (there, here))
    for cache in giving:
        for part in cache.parts:
            part.copy_(torch.randn(part.shape))
    giver, taker = Pages(giving, b"l" * 32), Pages(taking, b"l" * 32)
    assert giver.block_bytes == taker.block_bytes == shape.num_bytes
    read = giver.read(np.array([3, 19], dtype=np.uint32))
    read.pending.wait()
    taker.write(np.array([7, 1], dtype=np.uint32), read.content).wait()
    for gave, took in zip(giving, taking, strict=True):
        for was, part in zip(gave.parts, took.parts, strict=True):
            assert torch.equal(part[[7, 1]].cpu(), was[[3, 19]].cpu())
            assert not part[[3, 19]].any()


# Bytes of a page of 4 positions and 3 layers: 2 heads' keys and values of 16 elements, or a vector of 24 + 8.
@pytest.mark.parametrize(("family", "num_bytes"), [("llama", 3072), ("deepseek-v3", 1536)])
def test_prompt_continues_from_blocks_of_another_replica(checkpoint: Make, family: str, num_bytes: int) -> None:
    folder = checkpoint(family).folder
    giver, taker = Rig(folder), Rig(folder)
    first = giver.step([New(0, PROMPT)], {0: len(PROMPT)})[0]
    blocks = np.array(giver.blocks(0)[:NUM_FULL], dtype=np.uint32).reshape(-1)
    given = giver.replica.transfers.read_pages(blocks).content
    assert given.shape == (NUM_FULL, giver.replica.pages.block_bytes)
    assert giver.replica.pages.block_bytes == num_bytes
    targets = np.array([70, 60, 50], dtype=np.uint32)
    with torch.inference_mode():
        taker.replica.transfers.write_pages(targets, given).wait()
        taker.replica.transfers.commit_pages(targets, hashes()).wait()
    report = taker.replica.end_epoch()
    assert dict(zip(report.block_ids, [report.hashes[i : i + 32] for i in range(0, 96, 32)], strict=True)) == dict(
        zip([50, 60, 70], hashes()[::-1], strict=True)
    )
    cached = New(0, PROMPT, cached_blocks=(70, 60, 50))
    assert taker.step([cached])[0] == first
    assert torch.allclose(taker.logits[0][0], giver.logits[0][0], atol=1e-5)


def test_uncommitted_pages_are_not_reported(checkpoint: Make) -> None:
    """The source worker may have reused the memory during the copy."""
    folder = checkpoint("llama").folder
    giver, taker = Rig(folder), Rig(folder)
    giver.step([New(0, PROMPT)], {0: len(PROMPT)})
    blocks = np.array(giver.blocks(0)[:NUM_FULL], dtype=np.uint32).reshape(-1)
    given = giver.replica.transfers.read_pages(blocks).content
    with torch.inference_mode():
        taker.replica.transfers.write_pages(np.array([70, 60, 50], dtype=np.uint32), given).wait()
    assert not taker.replica.end_epoch().block_ids


def test_blocks_of_unknown_content_are_not_read(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    blocks = np.array(rig.blocks(0)[:1], dtype=np.uint32).reshape(-1)
    rig.replica.transfers.read_pages(blocks)
    rig.replica.reset_cache()
    with pytest.raises(FailedPrecondition, match="the content of some blocks is unknown"):
        rig.replica.transfers.read_pages(blocks)


def test_a_layout_names_the_weights_and_how_kv_is_kept(checkpoint: Make, tmp_path: Path) -> None:
    def layout(of: Path, dtype: str = "float32") -> bytes:
        return layout_of(of, weight_samples.folder_digest(of), dtype=dtype)

    folder = checkpoint("llama").folder
    told = layout(folder)
    assert told == layout(folder)
    assert told != layout(folder, "bfloat16")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert told == layout(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert told != layout(tmp_path)
    assert Rig(folder).replica.pages.layout != Rig(folder, block_size=8).replica.pages.layout
