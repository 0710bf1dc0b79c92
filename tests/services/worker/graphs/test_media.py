"""Steps with rows of pictures use no recording; all others of the same sequences still do."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.services.worker.graphs.test_chunk_graphs import SHAPES, use_chunk_graphs
from tests.services.worker.media.pictures import encode, greedy, make_llava, picture, prompt_with
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

NUM_TOKENS = 6


@torch.inference_mode()
def test_only_chunks_of_pictures_run_without_a_recording(tmp_path: Path) -> None:
    model = make_llava(tmp_path)
    pixels = picture(1)
    tokens, media = prompt_with(8, pixels, 9)
    rig = Rig(tmp_path, record_logits=False)
    seen = use_chunk_graphs(rig.replica, SHAPES)
    encode(rig, pixels)
    replayed = []
    rig.step([New(0, tokens, media=tuple(media)), New(1, tokens[:4])], {0: 6, 1: 4})
    for chunk in (6, 12, 6, 3):  # the picture has the positions 8 to 23
        before = seen.num_forwards
        rig.step(counts={0: chunk})
        replayed.append(seen.num_forwards > before)
    assert replayed == [False, False, True, True]
    while len(rig.tokens(0)) < len(tokens) + NUM_TOKENS:
        rig.step()
    assert rig.tokens(0)[len(tokens) :][:NUM_TOKENS] == greedy(model, tokens, [pixels], NUM_TOKENS)
