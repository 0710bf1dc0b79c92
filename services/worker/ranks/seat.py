"""A rank's place in its group, and how it meets the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from services.worker.layers.context import ALL_TOKENS, Context
from services.worker.layers.sharding import WHOLE, Shard
from services.worker.layers.stages import ALL_LAYERS, Stage
from services.worker.ranks.link import open_link
from services.worker.ranks.peer_memory import Store, open_mailbox

if TYPE_CHECKING:
    from kernels.triton.rank_sums import Mailbox

# By the name that torch has for it: a newer one, or that of 2.11.
GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MEETING = timedelta(minutes=10)  # a rank may have to be started on another host
# Longest that a collective waits: rank 0 may compile kernels meanwhile. Steps have a watch of their own (engine.py).
PATIENCE = timedelta(minutes=10)

INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
_named_here: set[str] = set()  # of them those that nobody else has set


@dataclass(frozen=True, slots=True)
class Seat:
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

    def join(self, device: torch.device, *, own_sums: bool = False) -> tuple[Shard, Stage, Context]:
        """Meets the other ranks, all of which have to come; once in a process, until leave(). `own_sums`: GPUs add up
        few rows in memory that they write to each other, if they can."""
        if self.size == 1:
            return WHOLE, ALL_LAYERS, ALL_TOKENS
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which not every host lets processes have
        for variable in INTERFACES - os.environ.keys():
            os.environ[variable] = self.interface  # nobody else is to reach what is not encrypted
            _named_here.add(variable)
        store = TCPStore(self.host, self.port, self.size, is_master=False, timeout=MEETING)
        distributed.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
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
            context = Context(number, self.contexts, Together(self.contexts, device, lanes[lane]))
        if self.width == 1:
            return WHOLE, stage, context
        together = Together(self.width, device, group)
        if own_sums and device.type == "cuda":
            together.open_mailbox(PrefixStore(f"stage {number}", store), lane)
        return Shard(lane, self.width, together), stage, context


ALONE = Seat()


def leave() -> None:
    """CUDA graphs that hold collectives must be gone by now: NCCL would wait for them for ever."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    while _named_here:
        os.environ.pop(_named_here.pop(), None)  # the next group may meet elsewhere


class Together:
    """Collectives of torch.distributed, and sums of our own if asked for, in the order of the device's work."""

    def __init__(self, size: int, device: torch.device, group: Any = None) -> None:
        """`group`: None for that of all ranks."""
        self._size, self._device, self._group = size, device, group
        self._mailbox: Mailbox | None = None

    @property
    def joins_chains(self) -> bool:
        return self._mailbox is not None

    def open_mailbox(self, store: Store, rank: int) -> None:
        """Sums of few bytes are then the work of one kernel of our own, if all ranks can write to each other."""
        mailbox = open_mailbox(store, rank, self._size, self._device)
        if self.least(int(mailbox is not None)):
            self._mailbox = mailbox

    def add_up(self, x: Tensor) -> Tensor:
        return self._sum(x.contiguous(), None)

    def add_up_into(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        self._sum(x.contiguous(), residual, pdl=pdl)

    def _sum(self, x: Tensor, residual: Tensor | None, *, pdl: bool = False) -> Tensor:
        """In place of the residual, or of `x`."""
        if self._mailbox is not None:
            from kernels.triton.rank_sums import sum_of_ranks, sum_of_ranks_takes

            if sum_of_ranks_takes(x, self._mailbox):
                return sum_of_ranks(x, self._mailbox, residual, pdl=pdl)
        distributed.all_reduce(x, group=self._group)
        return x if residual is None else residual.add_(x)

    def side_by_side(self, x: Tensor) -> Tensor:
        return self.gather(x.contiguous()).transpose(0, 1).reshape(x.size(0), -1)

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self._size * x.size(0), *x.shape[1:]))
        GATHER(parts, x, group=self._group)
        return parts.view(self._size, *x.shape)

    def from_first(self, x: Tensor) -> None:
        distributed.broadcast(x, group=self._group, group_src=0)

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        wanted = [(distributed.isend, *each) for each in sent] + [(distributed.irecv, *each) for each in received]
        works = [distributed.P2POp(do, tensor, group=self._group, group_peer=rank) for do, tensor, rank in wanted]
        for work in distributed.batch_isend_irecv(works) if works else ():
            work.wait()

    def least(self, value: int) -> int:
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MIN, group=self._group)
        return int(shared.item())
