"""Features specific to Falcon-H1: completing the last layer for selected tokens only, and the position of gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.layers.forward_batch import ForwardBatch
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import runner_of, whole_model_of
from tests.services.worker.rig import Rig


@torch.inference_mode()
def test_the_last_layer_completes_the_tokens_that_are_wanted(checkpoint: Callable[[str], Checkpoint]) -> None:
    """On devices, steps name the tokens whose outputs are needed."""
    rig = Rig(checkpoint("falcon-h1").folder)
    model, caches = whole_model_of(rig.replica), runner_of(rig.replica).caches
    forward, seen = model.forward, []

    def watched(batch: ForwardBatch, caches: Any) -> torch.Tensor:
        seen.append((batch, forward(batch, caches)))
        return seen[-1][1]

    model.forward = watched
    rig.step([New(0, prompt(9)), New(1, prompt(13, 1))], {0: 9, 1: 13})
    ((batch, expected),) = seen
    tables, lens = batch.attention.block_tables, batch.attention.seq_lens
    starts = torch.arange(3, dtype=torch.int32)
    last = AttentionMetadata(tables, starts, lens, max_query_len=1, max_seq_len=13)
    torch.testing.assert_close(forward(replace(batch, last=last), caches), expected, atol=1e-6, rtol=1e-5)


def test_the_gate_may_come_before_the_norm(tmp_path: Path) -> None:
    made = checkpoints.make("falcon-h1-norms", tmp_path, mamba_norm_before_gate=False, mamba_conv_bias=False)
    rig = Rig(made.folder)
    rig.step([New(0, prompt(11))], {0: 7})
    rig.step(counts={0: 4})
    rig.step()
    assert error(rig, made, 0) < MAX_ERROR
