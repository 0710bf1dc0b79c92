"""Pictures on a GPU: tokens of transformers with and without CUDA graphs, steps in flight, and the memory of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.services.worker.media.waiting import MOST_PIXELS
from tests.services.worker.media.pictures import NUM_ROWS, encode, expected_logits, make_llava, picture, prompt_with
from tests.services.worker.media.test_with_scheduler import SIZES, ExpectedAnswers
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import chunk_graphs_of
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import WAYS
from tests.spec_decode.pair import Pair, build

pytestmark = pytest.mark.gpu

MAX_ERROR = 2e-3  # float32, sums in another order, of a random model


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_transformers(way: str, tmp_path: Path) -> None:
    model = make_llava(tmp_path)
    pictures = [picture(1), picture(2)]
    tokens, media = prompt_with(5, pictures[0], 3, pictures[1], 4)
    rig = Rig(tmp_path, device="cuda", **WAYS[way])
    encode(rig, *pictures)
    rig.step([New(0, tokens, media=tuple(media)), New(1, tokens[:5])], {0: 17, 1: 5})
    rig.step(counts={0: len(tokens) - 17})
    for _ in range(4):
        rig.step()
    rows = torch.stack(rig.logits[0])
    wanted = expected_logits(model, rig.tokens(0), pictures)[len(tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(wanted)], wanted, atol=MAX_ERROR, rtol=MAX_ERROR)


def test_two_steps_in_flight_and_preemption(tmp_path: Path) -> None:
    model = make_llava(tmp_path)
    settings: dict[str, Any] = {**SIZES, "device": "cuda", "max_num_batched_tokens": 64}
    asked = ExpectedAnswers(Pair(build(None, tmp_path, **settings)), model)
    first, second = picture(1), picture(2)
    for parts in [(5, first, 3), (20,), (9, second, 2, first, 1), (40, second)]:
        asked.ask(*parts)
    asked.pair.preempt_often(40)
    asked.pair.run()
    asked.check()
    assert chunk_graphs_of(asked.pair.replica).count > 0, "chunks of text are still recorded"


def test_the_rows_of_the_cache_are_left_free(tmp_path: Path) -> None:
    make_llava(tmp_path)
    common: dict[str, Any] = {"device": "cuda", "num_blocks": 0, "gpu_memory_utilization": 0.5, "dtype": "float32"}
    sizes = []
    for rows in (NUM_ROWS, 4 << 20):  # rows of 48 floats: 768 MiB
        limits = build(None, tmp_path, encoder_cache_size=rows, **common).limits
        sizes.append(limits.num_blocks * limits.block_size * 3 * 2 * 2 * 16 * 4)  # layers, KV, heads, their size, bytes
        torch.cuda.empty_cache()
    assert sizes[0] - sizes[1] > 0.8 * (4 << 20) * 48 * 4


def test_a_call_of_the_encoder_takes_about_10_ms() -> None:
    """The tower of LLaVA 1.5, as many pictures as one call may have."""
    from quire import kernels
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.services.worker.models.vision.registry import make_encoder
    from quire.shared.media.processor import Normalization

    vision = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336}
    vision |= {"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}
    place = LayerPlacement(kernels.load("cuda"), torch.bfloat16, torch.device("cuda"))
    normalization = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    encoder = make_encoder({"model_type": "llava", "vision_config": vision}, 4096, place, normalization)
    assert encoder is not None
    with torch.inference_mode():
        for _, destination in encoder.destinations():
            destination.normal_(0, 0.02)  # type: ignore[union-attr]
        encoder.finish()
        for count in (1, MOST_PIXELS // 336**2):
            pixels = torch.zeros((1, 336, 336, 3), dtype=torch.uint8, device="cuda")
            items = [MediaInput(pixels)] * count
            for _ in range(3):
                encoder.encode(items)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                encoder.encode(items)
            end.record()
            end.synchronize()
            took_ms = start.elapsed_time(end) / 5
            print(f"{count} pictures: {took_ms:.2f} ms")
            assert took_ms < 30
