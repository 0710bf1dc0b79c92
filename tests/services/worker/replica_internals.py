"""Parts of a replica that none of its users sees. Tests that watch or replace one take it from here, nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.services.worker.spec_decode.speculation import Speculation
from tests.services.worker.graphs.fake_device import AsynchronousCpu, Copying

if TYPE_CHECKING:
    from quire.services.worker.replica.replica import Replica


def runner_of(replica: Replica) -> Any:
    """Returns the ModelRunner."""
    return replica._runner


def whole_model_of(replica: Replica) -> Any:
    """Returns the model as it was loaded."""
    return runner_of(replica)._eager_model


def current_model_of(replica: Replica) -> Any:
    """Returns what steps go through that no graph takes: the model, or a tape of it."""
    return runner_of(replica)._model


def decode_graphs_of(replica: Replica) -> Any:
    return runner_of(replica).recordings.decodes


def chunk_graphs_of(replica: Replica) -> Any:
    return runner_of(replica).recordings.chunks


def sample_graphs_of(replica: Replica) -> Any:
    return runner_of(replica).recordings.samples


def propose(replica: Replica, proposer: Any) -> None:
    """Has drafts come from `proposer` from now on."""
    assert isinstance(replica.speculation, Speculation)
    replica.speculation._proposer = proposer


def give_memory_of_its_own(replica: Replica, num_groups: int = 0) -> None:
    """Makes the runner think that the CPU is a device with memory of its own, as graphs want it."""
    runner = runner_of(replica)
    runner._device, runner._staging = AsynchronousCpu("cpu", "pretending"), Copying()
    runner.prepare(runner.caches, replica.table.block_table, num_groups)


def kept_of(layers: Any) -> list[Any]:
    """Returns the memory that recurrent layers have for what is kept of drafts."""
    return [part for layer in layers for part in layer._kept]


def filler_of(replica: Replica) -> Any:
    """Returns what fills the masks of grammars."""
    return runner_of(replica).sampler.grammar_masks.builder._filler


def recorded_keys_of(graphs: Any) -> list[tuple[Any, ...]]:
    """Returns by what DecodeGraphs find a recording: its rows, and what is shared or adapted in it."""
    return list(graphs._graphs)


def recorded_steps_of(graphs: Any) -> list[tuple[Any, ...]]:
    """Returns by what ChunkGraphs find a recording: its shape, and whether it is adapted."""
    return list(graphs._steps)
