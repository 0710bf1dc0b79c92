"""Trainer's side of weight broadcasts: rank 0 of a process group with all ranks of all workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.tensor_headers import DEFAULT_GROUP
from quire.weights import stream as weights_stream

if TYPE_CHECKING:
    from quire.client import Client

TIMEOUT_S = 120.0
LOOK_S = 0.001


class WeightsUpdateGroup:
    """Process group with all workers: `with WeightsUpdateGroup(client, backend="gloo") as group:
    group.update(model.state_dict().items(), "step-7")`.

    Not thread-safe.
    """

    def __init__(
        self,
        client: Client,
        master_address: str = "127.0.0.1",
        *,
        backend: str = "nccl",
        group_name: str = DEFAULT_GROUP,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Makes all workers join. `master_address`: address of this machine that they can reach; `timeout_s`:
        maximum time for joining and for an update. "nccl" sends from the current GPU, which no worker may use."""
        workers = [service for service in client.status() if service.role == pb.ROLE_WORKER]
        size = 1 + sum(max(worker.num_ranks, 1) for worker in workers)
        self._client, self._name, self.timeout_s, self._num_updates = client, group_name, timeout_s, 0
        self._asking = ThreadPoolExecutor(1, "weights of a trainer")
        self._is_on_gpu = backend == "nccl"
        self._store = _store(master_address, size, timeout_s)
        joined = self._asking.submit(
            client.init_weights_update_group,
            master_address,
            self._store.port,
            1,
            size,
            group_name=group_name,
            backend=backend,
            timeout_s=timeout_s,
        )
        try:
            keys = [f"{group_name}/joining/{rank}" for rank in range(1, size)]
            self._await(lambda: self._store.check(keys), joined)
            if joined.done():
                joined.result()  # raises the reason if they cannot join; with NCCL they connect later
            self._group: Any = _member(self._store, group_name, backend, size, timeout_s)
            joined.result()
        except BaseException:
            self._asking.shutdown(wait=False)
            raise

    def update(self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait") -> str:
        """Broadcasts new weights; see Client.update_weights_from_tensor(). An error before tensors are sent changes
        nothing; any other error ends the group."""
        if self._group is None:
            raise InvalidArgument("the group has ended; create another one")
        tensors = list(named_tensors)
        heads = [weights_stream.head(name, tensor) for name, tensor in tensors]
        asked = self._asking.submit(
            self._client.update_weights_from_distributed,
            [head.name for head in heads],
            [tensor.dtype for _, tensor in tensors],
            [list(head.shape) for head in heads],
            weight_version=weight_version,
            mode=mode,
            group_name=self._name,
            timeout_s=self.timeout_s,
        )
        self._await(lambda: self._store.check([self._ready_key()]), asked)
        if asked.done():
            return asked.result()
        self._num_updates += 1
        try:
            for _, tensor in tensors:
                if tensor.numel() and not self._send(tensor, asked):
                    break
            return asked.result()
        except BaseException:
            self._group = None
            raise

    def close(self) -> None:
        """Ends the group; workers leave it, too."""
        self._group = None
        self._asking.shutdown()
        self._client.destroy_weights_update_group(self._name)

    def __enter__(self) -> WeightsUpdateGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready_key(self) -> str:
        """Returns the store key that members write before they receive."""
        return f"{self._name}/receiving/{self._num_updates}"

    def _send(self, tensor: Any, asked: Future[str]) -> bool:
        """Broadcasts a tensor as rank 0 and waits for it; returns False if the update ended before. Raises the
        update's error if the broadcast fails."""
        import torch
        from torch import distributed

        if asked.done():
            return False
        content = tensor.detach().contiguous()
        # gloo does not support every dtype
        content = content.cuda() if self._is_on_gpu else content.cpu().reshape(-1).view(torch.uint8)
        options = distributed.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=self.timeout_s)
        work = self._group.broadcast([content], options)
        self._await(work.is_completed, asked)
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError:
            asked.result()  # raises a more specific error
            raise
        return True

    def _await(self, is_there: Callable[[], bool], asked: Future[Any]) -> None:
        """Waits for a condition; returns early if the update has ended."""
        while not is_there() and not asked.done():
            time.sleep(LOOK_S)


def _store(address: str, size: int, timeout_s: float) -> Any:
    """Creates the store on one address: by default it would listen on all addresses of the host."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        timeout = timedelta(seconds=timeout_s)
        listening = server.detach()
    return TCPStore(
        address, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening
    )


def _member(store: Any, name: str, backend: str, size: int, timeout_s: float) -> Any:
    """Joins the process group as rank 0 of `size`, with the store's prefixes as torch makes them on the workers;
    blocks up to `timeout_s` seconds."""
    from torch import distributed
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    kind, timeout = "cuda" if backend == "nccl" else "cpu", timedelta(seconds=timeout_s)
    own = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    if backend == "nccl":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return distributed.ProcessGroupNCCL(own, 0, size, nccl)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=store.host)], timeout
    return gloo(own, 0, size, options)
