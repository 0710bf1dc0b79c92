"""A rank's place in its group, and how it meets the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from quire.services.worker.layers.context import ALL_TOKENS, Context
from quire.services.worker.layers.sharding import WHOLE, Shard
from quire.services.worker.layers.stages import ALL_LAYERS, Stage
from quire.services.worker.ranks.collectives.group_collectives import GroupCollectives
from quire.services.worker.ranks.link import open_link

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # a rank may have to be started on another host
# Longest that a collective waits: rank 0 may compile kernels meanwhile. Steps have a watch of their own (engine.py).
COLLECTIVE_TIMEOUT = timedelta(minutes=10)

INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
_named_here: set[str] = set()  # of them those that nobody else has set


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Travels to the rank's process."""

    rank: int = 0
    size: int = 1
    host: str = ""  # where rank 0 is reached
    port: int = 0
    stages: int = 1  # that the ranks are shared out among, neighbours together
    per_host: int = 0  # ranks of each host, neighbours together; 0: all are on one
    interface: str = "lo"  # by which ranks reach each other
    contexts: int = 1  # groups of ranks, neighbours together, that share out the tokens of long steps; or stages

    @property
    def local_rank(self) -> int:
        """Among those of this host."""
        return self.rank % (self.per_host or self.size)

    @property
    def width(self) -> int:
        """Ranks that the tensors of a stage are cut among."""
        return self.size // (self.stages * self.contexts)

    def join(
        self, device: torch.device, *, use_custom_all_reduce: bool = False, overlaps: bool = False
    ) -> tuple[Shard, Stage, Context]:
        """Meets the other ranks, all of which have to come; once in a process, until leave().
        `use_custom_all_reduce`: GPUs add up
        in memory that they write to each other, if they can. `overlaps`: many rows are added up beside products."""
        if self.size == 1:
            return WHOLE, ALL_LAYERS, ALL_TOKENS
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which not every host lets processes have
        for variable in INTERFACES - os.environ.keys():
            os.environ[variable] = self.interface  # nobody else is to reach what is not encrypted
            _named_here.add(variable)
        store = TCPStore(self.host, self.port, self.size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
        distributed.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        number, lane = divmod(self.rank, self.width)
        group, stage, context = None, ALL_LAYERS, ALL_TOKENS
        if self.width < self.size:
            groups = [distributed.new_group(range(i, i + self.width)) for i in range(0, self.size, self.width)]
            group = groups[number]
        if self.stages > 1:
            stage = Stage(number, self.stages, open_link(self.rank, self.size, self.stages, device))
        if self.contexts > 1:
            lanes = [distributed.new_group(range(i, self.size, self.width)) for i in range(self.width)]
            context = Context(number, self.contexts, GroupCollectives(self.contexts, device, lanes[lane]))
        if self.width == 1:
            return WHOLE, stage, context
        collectives, met = GroupCollectives(self.width, device, group), PrefixStore(f"stage {number}", store)
        if use_custom_all_reduce and device.type == "cuda":
            collectives.open_peer_memory(met, lane)
        if overlaps:
            collectives.open_overlapped_sums(met, lane)
        return Shard(lane, self.width, collectives), stage, context


SINGLE_RANK = RankPlacement()


def leave() -> None:
    """CUDA graphs that hold collectives must be gone by now: NCCL would wait for them for ever."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    while _named_here:
        os.environ.pop(_named_here.pop(), None)  # the next group may meet elsewhere
