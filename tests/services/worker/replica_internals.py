"""Access to internals of a replica for tests that watch or replace them; the only place with such access."""

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
    """Returns what executes steps that no graph accepts: the model, or a tape of it."""
    return runner_of(replica)._model


def decode_graphs_of(replica: Replica) -> Any:
    return runner_of(replica).recordings.decodes


def chunk_graphs_of(replica: Replica) -> Any:
    return runner_of(replica).recordings.chunks


def sample_graphs_of(replica: Replica) -> Any:
    return runner_of(replica).recordings.samples


def propose(replica: Replica, proposer: Any) -> None:
    """Makes `proposer` the source of drafts."""
    assert isinstance(replica.speculation, Speculation)
    replica.speculation._proposer = proposer


def give_memory_of_its_own(replica: Replica, num_groups: int = 0) -> None:
    """Makes the runner treat the CPU as a device with separate memory, as graphs need it."""
    runner = runner_of(replica)
    runner._device, runner._staging = AsynchronousCpu("cpu", "pretending"), Copying()
    runner.prepare(runner.caches, replica.table.block_table, num_groups)


def kept_of(layers: Any) -> list[Any]:
    """Returns the memory of recurrent layers for drafted states."""
    return [part for layer in layers for part in layer._kept]


def filler_of(replica: Replica) -> Any:
    """Returns the component that fills grammar masks."""
    return runner_of(replica).sampler.grammar_masks.builder._filler


def recorded_keys_of(graphs: Any) -> list[tuple[Any, ...]]:
    """Returns the keys of DecodeGraphs' recordings: number of rows, and sharing and adapters."""
    return list(graphs._graphs)


def recorded_steps_of(graphs: Any) -> list[tuple[Any, ...]]:
    """Returns the keys of ChunkGraphs' recordings: shape, and whether adapters are used."""
    return list(graphs._steps)
