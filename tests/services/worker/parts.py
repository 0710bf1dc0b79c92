"""Parts of a replica that none of its users sees. Tests that watch or replace one take it from here, nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.services.worker.graphs.pretending import Copying, PretendAsynchronous

if TYPE_CHECKING:
    from quire.services.worker.engine.replica import Replica
    from quire.services.worker.spec_decode.speculation import Speculation
    from quire.services.worker.step.slots import SlotTable


def runner_of(replica: Replica) -> Any:
    """Returns the ModelRunner."""
    return replica._runner


def table_of(replica: Replica) -> SlotTable:
    return replica._table


def whole_model_of(replica: Replica) -> Any:
    """Returns the model as it was loaded."""
    return runner_of(replica)._whole_model


def current_model_of(replica: Replica) -> Any:
    """Returns what steps go through that no graph takes: the model, or a tape of it."""
    return runner_of(replica)._model


def decode_graphs_of(replica: Replica) -> Any:
    return runner_of(replica)._graphs


def chunk_graphs_of(replica: Replica) -> Any:
    return runner_of(replica)._chunk_graphs


def sample_graphs_of(replica: Replica) -> Any:
    return runner_of(replica)._sample_graphs


def speculation_of(replica: Replica) -> Speculation:
    """Returns that of a replica that has one."""
    assert replica._speculation is not None
    return replica._speculation


def propose(replica: Replica, proposer: Any) -> None:
    """Has drafts come from `proposer` from now on."""
    speculation_of(replica)._proposer = proposer


def num_experts_moved(replica: Replica) -> int:
    assert replica._expert_balance is not None
    return replica._expert_balance.num_moved


def weights_of(replica: Replica) -> Any:
    return replica._weights


def give_memory_of_its_own(replica: Replica, num_groups: int = 0) -> None:
    """Makes the runner think that the CPU is a device with memory of its own, as graphs want it."""
    runner = runner_of(replica)
    runner._device, runner._staging = PretendAsynchronous("cpu", "pretending"), Copying()
    runner.prepare(runner.caches, table_of(replica).block_table, num_groups)


def kept_of(layers: Any) -> list[Any]:
    """Returns the memory that recurrent layers have for what is kept of drafts."""
    return [part for layer in layers for part in layer._kept]


def filler_of(replica: Replica) -> Any:
    """Returns what fills the masks of grammars."""
    return runner_of(replica).sampler.grammar_masks.maker._filler


def recorded_keys_of(graphs: Any) -> list[tuple[Any, ...]]:
    """Returns by what DecodeGraphs find a recording: its rows, and what is shared or adapted in it."""
    return list(graphs._graphs)


def recorded_steps_of(graphs: Any) -> list[tuple[Any, ...]]:
    """Returns by what ChunkGraphs find a recording: its shape, and whether it is adapted."""
    return list(graphs._steps)
