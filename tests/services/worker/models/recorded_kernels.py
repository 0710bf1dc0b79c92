"""`python -m tests.services.worker.models.recorded_kernels SHAPE [adapters]`: kernels launched by the graphs of a
shape's steps, and those not compiled in advance.

Everything is on torch's meta device: addresses are aligned, but there is no memory. Triton reports what it would
compile, without compiling.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire import kernels
from quire.bench.workload import shapes
from quire.kernels import triton as triton_package
from quire.kernels.triton.precompile.calls import precompile_calls
from quire.kernels.triton.precompile.processes import AbsentGpu
from quire.services.worker.attention.triton import TritonAttention
from quire.services.worker.graphs.chunk_graphs import ROWS, ChunkGraphs, chunk_shapes
from quire.services.worker.graphs.decode_graphs import DecodeGraphs, graph_sizes
from quire.services.worker.graphs.recorded_steps import RecordedModel
from quire.services.worker.graphs.row_facts import RowWatch
from quire.services.worker.graphs.step_edges import TritonStepEdges
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_memory import block_shape
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits import worker_limits
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.lora.adapters import AdapterManager
from quire.services.worker.lora.linear_adapters import AdapterCapacity
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.registry import find_model, read_model_config
from quire.services.worker.models.single_row import SingleRowProgram, model_reject_reason
from quire.services.worker.sampling.choice import PlainChoice
from quire.services.worker.sampling.vocabulary.whole_vocabulary import WholeVocabulary
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import SlotTable
from quire.services.worker.warmup.build_kernels import model_shape
from quire.shared.models.model_identity import read_config
from quire.shared.settings import WorkerSettings

META = torch.device("meta")
HOPPER = 90
TREES = json.dumps(
    {"method": "eagle", "model": "HEAD", "num_speculative_tokens": 2, "speculative_token_tree": "[(0,), (1,)]"}
)
NUM_BLOCKS = 1000

Kernel = tuple[str, str]  # name, and the constants it is compiled for


class RequestedKernels:
    """Kernels requested since the last take()."""

    def __init__(self) -> None:
        self._kernels: set[Kernel] = set()
        driver.set_active(AbsentGpu(HOPPER))
        triton.knobs.runtime.jit_cache_hook = self._on_missing
        run = JITFunction.run
        JITFunction.run = lambda *arguments, **options: run(*arguments, **{**options, "warmup": True})

    def _on_missing(self, *, key: str, fn: Any, **_: object) -> bool:
        """Returns True to skip the compilation."""
        self._kernels.add((fn.name, key))
        return True

    def take(self) -> set[Kernel]:
        found, self._kernels = self._kernels, set()
        return found


class RunningRecorder:
    """Recorder that runs the work instead of recording it."""

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Any]:
        results = [first()]
        for step in others:
            results.append(step(results[-1]))
        return results

    def is_launch_bound(self, work: Callable[[], Tensor]) -> bool:
        work()
        return True


class NoCopies:
    """Staging without copies, for the meta device."""

    def upload_into(self, columns: Tensor, arrays: list[Any], padding: list[Any]) -> None: ...


def described(settings: WorkerSettings) -> tuple[DecoderConfig, WorkerLimits]:
    config = read_model_config(read_config(Path(settings.model)))
    return config, worker_limits.from_settings(settings, config.max_positions)


def record_all(settings: WorkerSettings) -> None:
    """Records every graph that a worker with these settings records."""
    config, wanted = described(settings)
    fitting = worker_limits.fit(wanted, NUM_BLOCKS, explicit=False)
    triton_package.unavailable = lambda: None
    ops, dtype = kernels.load("cuda"), torch.bfloat16
    staging, room = NoCopies(), AdapterCapacity(settings.max_loras, settings.max_lora_rank)
    adapters = (
        AdapterManager([], ops, dtype, META, wanted, staging=staging, capacity=room) if settings.lora_folders else None
    )
    place = LayerPlacement(ops, dtype, META, adapters=adapters)
    has_trees = bool(settings.speculative_config)
    spec = replace(attention_spec(config, fitting.block_size, place, has_trees=has_trees), device="cuda")
    backend = TritonAttention()
    assert backend.reject_reason(spec) is None
    model = find_model(read_config(Path(settings.model)))(config, backend, place, fitting.max_model_len)
    model.finish()
    shape = block_shape(spec, config.num_layers, place.dtype)
    caches = kv_cache.allocate(shape, NUM_BLOCKS, META)
    single_row = None if model_reject_reason(model, place) else SingleRowProgram(model, pdl=True)

    def logits(batch: ForwardBatch) -> Tensor:
        if single_row is not None and batch.token_ids.size(0) == 1:
            return single_row.logits(batch, caches)
        return model.logits(model.forward(batch, caches), *(adapters.logit_rows if adapters else ()))

    num_slots, width = SlotTable(fitting).block_table.shape
    tables = torch.zeros((num_slots + 1, width), dtype=torch.int32, device=META)
    memory = SlotMemory(tables, torch.zeros(num_slots + 1, dtype=torch.int32, device=META))
    tile = backend.rows_per_prefix_tile(spec)
    choice = PlainChoice(WholeVocabulary(model.config.vocab_size, place.ops), max(num_slots, *ROWS), META)
    step = adapters.step if adapters else None
    recorded = RecordedModel(
        logits, choice, TritonStepEdges(), fitting.max_model_len, tile, adapters=step, has_trees=spec.has_trees
    )
    watch = RowWatch(SlotTable(fitting).block_table, fitting.block_size, tile)
    tools: Any = {"recorder": RunningRecorder(), "staging": NoCopies()}
    for adapted in (False, True)[: 1 + bool(step)]:
        with step.recording_with(adapted) if step else nullcontext():
            DecodeGraphs(recorded, memory, graph_sizes(fitting.max_num_seqs), watch=watch, **tools).capture()
            ChunkGraphs(recorded, memory, chunk_shapes(fitting, 1), **tools).capture()


def main(name: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = shapes.prepare(name, Path(scratch)).folder
        folders = (scratch,) if "adapters" in options else ()
        settings = WorkerSettings(
            model=str(folder),
            device="cuda",
            load_format="dummy",
            lora_folders=folders,
            speculative_config=TREES if "trees" in options else "",
        )
        requested = RequestedKernels()
        for call in precompile_calls(model_shape(settings, *described(settings))):
            call()
        compiled = requested.take()
        record_all(settings)
        called = requested.take()
    print(json.dumps({"called": sorted({k for k, _ in called}), "forgotten": sorted(k for k, _ in called - compiled)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
