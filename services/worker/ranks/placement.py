"""Placement of a rank within its groups, and the rendezvous of the ranks."""

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
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # ranks may have to be started on another host
# Rank 0 may compile kernels during a collective. Hanging steps are detected separately (engine.py).
COLLECTIVE_TIMEOUT = timedelta(minutes=10)

INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
_named_here: set[str] = set()  # variables of INTERFACES set by join()


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Rank number, group sizes and rendezvous address; passed to the rank's process."""

    rank: int = 0
    size: int = 1
    host: str = ""  # rendezvous address on rank 0's host
    port: int = 0
    stages: int = 1  # pipeline stages, each of consecutive ranks
    per_host: int = 0  # ranks per host, consecutive; 0: all on one host
    interface: str = "lo"  # network interface between the ranks
    contexts: int = 1  # context-parallel groups of consecutive ranks, which divide the tokens of long steps

    @property
    def local_rank(self) -> int:
        """Rank number within this host."""
        return self.rank % (self.per_host or self.size)

    @property
    def width(self) -> int:
        """Number of ranks that the tensors of a stage are sharded among."""
        return self.size // (self.stages * self.contexts)

    def join(
        self, device: torch.device, *, use_custom_all_reduce: bool = False, overlaps: bool = False
    ) -> tuple[Shard, Stage, Context]:
        """Joins the process groups and returns this rank's place in its stage, pipeline and contexts; all ranks must
        call it, once per process until leave(). `use_custom_all_reduce`: use kernels over shared GPU memory, if
        possible; `overlaps`: overlap all-reduces of many rows with their products. Sets NCCL and Gloo environment
        variables."""
        if self.size == 1:
            return WHOLE, ALL_LAYERS, ALL_TOKENS
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which not every host permits
        for variable in INTERFACES - os.environ.keys():
            os.environ[variable] = self.interface  # collectives are not encrypted: bind them to this interface
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
    """Leaves the process groups. CUDA graphs that contain collectives must be destroyed before: NCCL would wait for
    them forever."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    while _named_here:
        os.environ.pop(_named_here.pop(), None)  # the next group may use another interface
