"""Scenarios around a request that must not change its output: cluster settings and disturbances."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import bundled
from quire.requests import RequestOptions
from tests.e2e.encoders import late_interaction_folder
from tests.matrix.disturbance import (
    ADAPTER,
    FETCHED,
    GENERATED,
    HANDED_OVER,
    MODEL,
    MOVED,
    READ_BACK,
    RESUBMITTED,
    Disturbance,
)
from tests.matrix.requesting import PLAIN

EAGLE = Path(bundled.FOLDER).parent / "drafters" / "eagle"
SMALL_STEP = 40  # tokens; prompts are longer
Occurred = Callable[[Disturbance], Awaitable[bool]]
SPECULATION = {"method": "eagle", "model": str(EAGLE), "num_speculative_tokens": 3, "adaptive_length": False}


async def _always(_disturbance: Disturbance) -> bool:
    """True: the settings guarantee that it occurs."""
    return True


def _counted(name: str) -> Occurred:
    async def occurred(disturbance: Disturbance) -> bool:
        counted = [*(await disturbance.schedulers()).values(), await disturbance.frontend()]
        return any(totals[name] > 0 for totals in counted)

    return occurred


def _done(name: str) -> Occurred:
    async def occurred(disturbance: Disturbance) -> bool:
        return bool(getattr(disturbance, name))

    return occurred


async def _all_generated(disturbance: Disturbance) -> bool:
    return all(totals[GENERATED] > 0 for totals in (await disturbance.schedulers()).values())


@dataclass(frozen=True)
class Scenario:
    """Settings of the services, options of request number i, a disturbance while requests run, and a check of the
    counters that it occurred."""

    worker: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    apart: tuple[int, int] = (0, 0)  # numbers of prefill and of decode workers, instead of `workers`
    schedulers: int = 1
    options: Callable[[int], RequestOptions] = lambda _number: PLAIN
    on_disk: bool = False  # workers have a folder
    disturb: Callable[[Disturbance], Awaitable[None]] | None = None
    beside: Callable[[Disturbance, asyncio.Event], Awaitable[None]] | None = None  # all others, until the event
    late: bool = False  # the model also computes late-interaction scores
    occurred: Occurred = _always


SCENARIOS: dict[str, Scenario] = {
    "prefix cache": Scenario(  # with partial block matches
        scheduler={"prefix_grain": 2}, occurred=_counted("vllm:prefix_cache_hits_total")
    ),
    "chunked prefill": Scenario(
        {"max_num_batched_tokens": SMALL_STEP, "max_num_seqs": 24}, {"long_prefill_token_threshold": 10}
    ),
    "preemption": Scenario(
        {"num_blocks": 40},
        {"watermark": 0.0},
        disturb=Disturbance.preempt,
        occurred=_counted("vllm:num_preemptions_total"),
    ),
    "host memory": Scenario(  # prompts exceed the device's memory
        {"num_blocks": 60, "kv_offloading_size": 0.02},
        disturb=Disturbance.crowd_out,
        occurred=_counted(FETCHED),
    ),
    "KV on disk": Scenario(  # prompts exceed host memory, too
        {"num_blocks": 60, "kv_offloading_size": 0.0036},
        on_disk=True,
        disturb=Disturbance.crowd_onto_disk,
        occurred=_counted(READ_BACK),
    ),
    "pause": Scenario(disturb=Disturbance.pause),
    "migration": Scenario(
        workers=2, disturb=Disturbance.kill_workers, occurred=_counted(MOVED)
    ),
    "prefill apart from decode": Scenario(
        scheduler={"prefill_threshold": 8},
        apart=(1, 1),
        disturb=Disturbance.hand_over,
        occurred=_counted(HANDED_OVER),
    ),
    "resubmission": Scenario(
        disturb=Disturbance.kill_schedulers, occurred=_counted(RESUBMITTED)
    ),
    "several schedulers": Scenario(
        workers=2, schedulers=2, occurred=_all_generated
    ),
    "speculation": Scenario(
        {"speculative_config": json.dumps(SPECULATION)}, occurred=_counted("vllm:spec_decode_num_accepted_tokens_total")
    ),
    "an adapter beside": Scenario(
        {"lora": {ADAPTER: str(bundled.ADAPTERS / ADAPTER)}},
        disturb=Disturbance.ask_adapter,
        occurred=_done("num_adapted"),
    ),
    "vectors beside": Scenario(disturb=Disturbance.embed, occurred=_done("num_embedded")),
    "comparisons beside": Scenario(
        {"query_cache_mb": 1}, beside=Disturbance.compare, late=True, occurred=_done("num_compared")
    ),
    "weights that are renewed": Scenario(
        {"weights_folders": [str(MODEL)]}, disturb=Disturbance.renew_weights, occurred=_done("num_renewed")
    ),
    "sleep": Scenario(disturb=Disturbance.sleep, occurred=_done("num_slept")),
    "steps in flight": Scenario(scheduler={"max_steps_in_flight": 4}),
    "priorities": Scenario(
        scheduler={"scheduling_policy": "priority"}, options=lambda number: RequestOptions(priority=-number)
    ),
}  # fmt: skip
INCOMPATIBLE = {
    frozenset(pair)
    for pair in (
        ("an adapter beside", "weights that are renewed"),  # refused by workers with adapters
        ("an adapter beside", "sleep"),  # refused at level 2
        ("comparisons beside", "vectors beside"),  # such a model has no sentence embeddings
        ("KV on disk", "speculation"),
        ("prefill apart from decode", "KV on disk"),
        ("host memory", "speculation"),  # a drafter's KV stays on the device
        ("prefill apart from decode", "speculation"),
        ("prefill apart from decode", "preemption"),  # the decoding worker has no room for handed-over blocks
        ("prefill apart from decode", "host memory"),
        ("prefill apart from decode", "several schedulers"),  # each scheduler would have one worker
        ("prefill apart from decode", "resubmission"),  # resubmitted prompts are found on the decoding worker
    )
}


@dataclass(frozen=True)
class ScenarioGroup:
    """Several scenarios at once."""

    parts: Sequence[Scenario]

    def cluster(self, folder: Path) -> dict[str, Any]:
        """Arguments of running_cluster; `folder` is used by this cluster only."""
        worker: dict[str, Any] = {"threads": 1, "num_blocks": 1000}
        scheduler: dict[str, Any] = {"heartbeat_interval_ms": 200}
        for part in self.parts:
            worker |= part.worker
            scheduler |= part.scheduler
        if any(part.on_disk for part in self.parts):
            (folder / "kv").mkdir()
            worker |= {"kv_offloading_disk": str(folder / "kv"), "kv_offloading_disk_size": 0.1}
        return {
            "model": str(late_interaction_folder.write(folder / "model"))
            if any(part.late for part in self.parts)
            else "",
            "workers": max(part.workers for part in self.parts),
            "schedulers": max(part.schedulers for part in self.parts),
            "apart": max(part.apart for part in self.parts),
            "worker": worker,
            "scheduler": scheduler,
        }

    @property
    def takes_pictures(self) -> bool:
        """Whether the model is the whole bundled one; the late-interaction model is of its text part."""
        return not any(part.late for part in self.parts)

    def options(self, number: int) -> RequestOptions:
        return next((made for part in self.parts if (made := part.options(number)) != PLAIN), PLAIN)


def pairs(names: Sequence[str]) -> set[frozenset[str]]:
    """All pairs of scenarios that can be combined."""
    return {pair for two in itertools.combinations(names, 2) if (pair := frozenset(two)) not in INCOMPATIBLE}


def crowds(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Few groups of at most `size` scenarios that contain every pair at least once; greedy by the number
    of new pairs."""
    bits = {pair: 1 << number for number, pair in enumerate(map(frozenset, itertools.combinations(names, 2)))}
    apart = sum(bits.get(frozenset(pair), 0) for pair in INCOMPATIBLE)
    groups = (some for count in (size, size - 1, size - 2) for some in itertools.combinations(names, count))
    within = ((some, sum(bits[frozenset(two)] for two in itertools.combinations(some, 2))) for some in groups)
    possible = {some: together for some, together in within if not together & apart}  # sets of pairs, as bits
    left, found = sum(bits.values()) & ~apart, []
    while left:
        best = max(possible, key=lambda some: (left & possible[some]).bit_count())
        assert left & possible[best], f"no group has {[set(pair) for pair, bit in bits.items() if bit & left]}"
        left &= ~possible[best]
        found.append(best)
    return found
