"""Recorded steps with adapters sample the same tokens as steps launched kernel by kernel; on the CPU they are repeated
instead of recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.services.worker.graphs.chunk_graphs import ChunkGraphs, ChunkShape
from quire.services.worker.graphs.cuda_graph import EagerRecorder, Recordable, Recording
from quire.services.worker.graphs.decode_graphs import DecodeGraphs
from quire.services.worker.graphs.recorded_steps import RecordedModel
from quire.services.worker.graphs.row_facts import RowWatch
from quire.services.worker.graphs.step_edges import TorchStepEdges
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.lora.peft import peft_folder
from quire.services.worker.lora.step_adapter_rows import StepAdapterRows
from quire.services.worker.sampling.choice import PlainChoice
from quire.shared.models.adapter_ids import AdapterId
from tests.observing import calls_of
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.graphs.fake_device import Copying
from tests.services.worker.graphs.test_decode_graphs import SAMPLINGS, plain_rig, run_both
from tests.services.worker.lora import peft_folders
from tests.services.worker.lora.peft_folders import bases, each_expert, embedding, head, whole_embedding, whole_head
from tests.services.worker.models.test_logits import Make, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import (
    give_memory_of_its_own,
    recorded_keys_of,
    recorded_steps_of,
    runner_of,
    whole_model_of,
)
from tests.services.worker.rig import Rig

SHAPES = [ChunkShape(8, 5), ChunkShape(8, 9), ChunkShape(24, 9)]
NAMES = ("", "a", "b")


class AsRecorded(EagerRecorder):
    """Recorder that fixes at recording time whether layers apply adapters, as a CUDA graph does."""

    def __init__(self, rows: StepAdapterRows) -> None:
        self._rows = rows

    def capture(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        was_active = self._rows.is_active

        def frozen() -> Tensor:
            with self._rows.recording_with(was_active):
                return first()

        return super().capture(frozen, *others)


def recorded_rig(made: Checkpoint, **settings: Any) -> tuple[Rig, DecodeGraphs, ChunkGraphs]:
    """Builds a rig as on a GPU: static memory, and recordings of steps with and without adapters."""
    rig = plain_rig(made, record_logits=False, num_blocks=400, **settings)
    replica = rig.replica
    runner, limits, table = runner_of(replica), replica.limits, replica.table
    give_memory_of_its_own(replica)
    rows = replica.adapters.step
    rows.is_active = rows._is_always = False

    def logits(batch: ForwardBatch) -> Tensor:
        hidden = whole_model_of(replica).forward(batch, runner.caches)
        return whole_model_of(replica).logits(hidden, *replica.adapters.logit_rows)

    model = RecordedModel(
        forward=logits,
        choice=PlainChoice(runner.sampler.vocabulary, 9, torch.device("cpu")),
        edges=TorchStepEdges(),
        max_seq_len=limits.max_model_len,
        rows_per_prefix_tile=0,
        adapters=rows,
    )
    watch = RowWatch(table.block_table, limits.block_size, 0)
    tools: Any = {"recorder": AsRecorded(rows), "staging": Copying()}
    decodes = DecodeGraphs(model, runner.slot_memory, [1, 4, limits.max_num_seqs], watch=watch, **tools)
    chunks = ChunkGraphs(model, runner.slot_memory, SHAPES, **tools)
    runner.use_graphs(decodes)
    runner.use_chunk_graphs(chunks)
    return rig, decodes, chunks


@torch.inference_mode()
def test_random_work_samples_the_same_tokens(checkpoint: Make, tmp_path: Path) -> None:
    """Mixes admissions with and without adapters, chunks, decodes, releases and reused slots."""
    made, more = checkpoint("qwen3-moe-tied"), [embedding, head, each_expert]
    folders = {
        name: str(peft_folders.save(made, tmp_path / name, seed=seed, more=more).folder)
        for seed, name in enumerate(NAMES)
        if name
    }
    rig, decodes, chunks = recorded_rig(made, lora=folders)
    rigs = [rig, plain_rig(made, num_blocks=400, lora=folders)]
    choose = random.Random(3)
    free, pending = set(range(8)), {}
    for step in range(150):
        may_end = 0.3 if step % 30 > 24 else 0.05  # periodically nearly all sequences end
        released = [slot for slot in rigs[1].scheduler.rows if choose.random() < may_end and slot not in pending]
        for each in rigs:
            for slot in released:
                each.scheduler.give_back(slot)
        free |= set(released)
        new = []
        if free and choose.random() < 0.4:
            slot, name = free.pop(), choose.choice(NAMES)
            tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 30))]
            new.append(New(slot, tokens, sampling=choose.choice(SAMPLINGS), adapter=name))
            pending[slot] = len(tokens)
        counts = {slot: min(left, choose.randrange(1, 19)) for slot, left in pending.items()}
        pending = {slot: left - counts[slot] for slot, left in pending.items() if left > counts[slot]}
        run_both(rigs, new, counts, released)
    assert {adapted for *_, adapted in recorded_keys_of(decodes)} == {False, True}
    assert {adapted for _, adapted in recorded_steps_of(chunks)} == {False, True}


@torch.inference_mode()
def test_adapters_come_and_go_between_replays(checkpoint: Make, tmp_path: Path) -> None:
    """Earlier recordings work with adapters that are loaded later under reused numbers."""
    made = checkpoint("qwen3-tied")
    kinds = {"a": [bases, embedding, head], "b": [whole_embedding, whole_head], "c": [bases, embedding, head]}
    names = ["embed_tokens", "lm_head"]
    saved = [
        peft_folders.save(made, tmp_path / name, seed=seed, more=more, modules_to_save=names if name == "b" else None)
        for seed, (name, more) in enumerate(kinds.items())
    ]
    settings = {"lora_folders": [str(tmp_path)], "max_loras": 2, "lora_modules_to_save": names}
    rigs = [recorded_rig(made, **settings)[0], plain_rig(made, num_blocks=400, **settings)]

    def load(folder: Path) -> AdapterId:
        read = peft_folder.read("x", folder)
        for rig in rigs:
            rig.replica.adapters.add(read, read.digest())
        return AdapterId("x", read.digest())

    texts = []
    for folder in (each.folder for each in saved):
        adapter = load(folder)
        run_both(rigs, [New(0, prompt(9, 1), adapter="x"), New(1, prompt(9, 1))], {0: 9, 1: 9})
        for _ in range(6):
            run_both(rigs)
        texts.append(tuple(rigs[0].tokens(0)))
        for rig in rigs:
            rig.step(released=[0, 1])
            rig.replica.adapters.remove(adapter)
        run_both(rigs, [New(2, prompt(5, 4))], {2: 5})
        for _ in range(3):
            run_both(rigs)
        for rig in rigs:
            rig.step(released=[2])
    assert len(set(texts)) == len(saved)


@torch.inference_mode()
def test_unchanged_rows_are_not_uploaded_again(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    folder = peft_folders.save(made, tmp_path / "a", seed=1, more=[head]).folder
    rig, *_ = recorded_rig(made, lora={"a": str(folder)})
    with calls_of(StepAdapterRows.write, StepAdapterRows.write_logits) as calls:
        rig.step([New(0, prompt(9), adapter="a")], {0: 9})
        for _ in range(9):
            rig.step()
    sent = [call.name for call in calls]
    assert 0 < sent.count("write") <= 2
    assert 0 < sent.count("write_logits") <= 2
