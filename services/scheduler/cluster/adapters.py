"""LoRA adapters of a cluster: which exist, which workers have loaded them, and how they are loaded and unloaded.

An adapter is identified by its name and its content. One that is replaced or unloaded is no longer offered to
frontends; it stays loaded while a sequence uses it, and then workers unload it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.replicas.adapters import Outcome, ReplicaAdapters
from quire.shared.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
)
from quire.shared.logs import logger
from quire.shared.models import adapter_ids
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2

log = logger("adapters")

MAX_NAME_LENGTH = 256  # characters
MAX_PATH_LENGTH = 4096
LOAD_TIMEOUT_S = 50.0
MAX_OFFERED = 256  # as many as a worker may load at its start
MAX_REMEMBERED_UNLOADED = 1024


class AdapterWorker(Protocol):
    """Attached worker as ClusterAdapters sees it; replicas and the in-process engine's worker implement it."""

    hello: worker_pb2.WorkerHello
    adapters: ReplicaAdapters
    core: Core
    leaving: bool

    @property
    def id(self) -> str: ...


@dataclass(slots=True)
class KnownAdapter:
    """Adapter that sequences use or may use; `leaving`: it is no longer offered to requests."""

    id: AdapterId
    path: str
    leaving: bool = False


class ClusterAdapters:
    """Adapters of all workers; state of one event loop. Workers that cannot load adapters at run time have theirs from
    their start."""

    def __init__(
        self,
        replicas: Mapping[str, AdapterWorker],
        *,
        num_users: Callable[[AdapterId], int],
        used_by: Callable[[AdapterWorker], Collection[object]],
        on_loaded: Callable[[], None],
    ) -> None:
        """`replicas`: by id, kept up to date by the owner; `num_users`: returns the number of sequences that name an
        adapter; `used_by`: returns the adapters of a worker's sequences; `on_loaded`: called when a worker has loaded
        an adapter."""
        self._replicas, self._num_users, self._used_by, self._on_loaded = replicas, num_users, used_by, on_loaded
        self._known: dict[AdapterId, KnownAdapter] = {}
        self._unloaded: dict[AdapterId, None] = {}  # not adopted again from a worker that missed the unloading
        self._loading = asyncio.Lock()
        # While an operator's load call is in progress, outcomes of orders that no call waits for: one of them may be
        # the adapter that this call is about to offer.
        self._late: list[tuple[AdapterWorker, Outcome]] | None = None
        self._fetched: set[AdapterId] = set()  # adapters ordered in this round

    @property
    def offered(self) -> dict[str, bytes]:
        """Digests by name, ascending: the adapters that requests may choose."""
        offered = {known.id.name: known.id.digest for known in self._known.values() if not known.leaving}
        return {name: offered[name] for name in sorted(offered)}

    def has_adapter(self, adapter: AdapterId) -> bool:
        return adapter in self._known

    # Workers.

    def on_worker_attached(self, replica: AdapterWorker) -> None:
        """Adopts the worker's adapters, except those that were unloaded or differ in content from a known adapter of
        the same name, and has it load the missing ones."""
        hello, offered = replica.hello, self.offered
        paths = list(hello.lora.paths) or [""] * len(hello.lora.names)
        ids = adapter_ids.ids(hello.lora.names, hello.lora.digests)
        for adapter, path in zip(reversed(ids), reversed(paths), strict=True):  # of one name the newest is last
            if adapter in self._known:
                continue
            if adapter in self._unloaded or adapter.name in offered:
                log.info("a worker has an adapter that was unloaded", worker=replica.id, adapter=adapter.name)
                replica.adapters.unload(adapter)
                continue
            self._offer(adapter, path)
            offered = self.offered
        if not replica.adapters.can_load:
            self._withdraw_lost()
        self._complete()

    def _withdraw_lost(self) -> None:
        """Stops offering adapters that no worker has, where workers cannot load adapters at run time."""
        loaded = {adapter for replica in self._replicas.values() for adapter in replica.adapters.loaded}
        for adapter in self._known.keys() - loaded:
            del self._known[adapter]
            log.warning(
                "no worker has an adapter any more; it is removed from the list of models", adapter=adapter.name
            )

    def _complete(self) -> None:
        """Has workers load the adapters they lack, as far as they have free slots."""
        for replica in self._replicas.values():
            for known in self._known.values():
                if replica.adapters.is_full:
                    break
                if self._lacks(replica, known.id) and (not known.leaving or self._num_users(known.id)):
                    self._order(replica, known)

    def order_load(self, adapter: AdapterId) -> None:
        """Has the least loaded able worker load an adapter that a sequence waits for, instead of one without users. If
        all slots are in use, the least recently used adapter is reserved for its current users; the caller asks again
        later."""
        known = self._known.get(adapter)
        if known is None or adapter in self._fetched or not any(r.adapters.can_load for r in self._replicas.values()):
            return
        self._fetched.add(adapter)
        if any(replica.adapters.is_loading(adapter.name) for replica in self._replicas.values()):
            return
        candidates = [
            replica for replica in self._replicas.values() if not replica.leaving and self._lacks(replica, adapter)
        ]
        candidates.sort(key=lambda replica: replica.core.num_pending_tokens)
        target = next((replica for replica in candidates if self._free_slot(replica)), None)
        if target is not None:
            self._order(target, known)
        elif candidates:
            own = candidates[0].adapters
            own.reserved.update([adapter for adapter in own.loaded if adapter not in own.reserved][:1])

    def begin_fetch_round(self) -> None:
        """Starts a new pass over the waiting sequences, in order of arrival."""
        self._fetched.clear()
        for replica in self._replicas.values():
            replica.adapters.reserved.clear()

    def _lacks(self, replica: AdapterWorker, adapter: AdapterId) -> bool:
        """Returns whether a worker has not loaded an adapter and could load it."""
        adapters = replica.adapters
        return (
            adapters.can_load
            and adapter not in adapters.loaded
            and adapter not in adapters.rejected
            and not adapters.is_loading(adapter.name)
        )

    def _free_slot(self, replica: AdapterWorker) -> bool:
        """Unloads the least recently used adapter without users if all slots are taken; returns whether a slot is
        free."""
        if not replica.adapters.is_full:
            return True
        used = self._used_by(replica)
        unused = next((adapter for adapter in replica.adapters.loaded if adapter not in used), None)
        if unused is not None:
            replica.adapters.unload(unused)
        return unused is not None

    def _order(self, replica: AdapterWorker, known: KnownAdapter) -> None:
        """Has a worker load a known adapter. If its content differs or the load fails, the worker is not asked for
        this adapter again."""

        def done(outcome: Outcome) -> None:
            """Handles the outcome of the load order; an adapter that is no longer known is unloaded again."""
            self._handle_late_outcome(replica, outcome)  # it may have been unloaded meanwhile
            if outcome == known.id:
                self._on_loaded()
                return
            replica.adapters.rejected.add(known.id)
            reason = outcome.message if isinstance(outcome, QuireError) else "its content has changed"
            log.warning("a worker could not load an adapter", worker=replica.id, adapter=known.id.name, reason=reason)

        replica.adapters.load(known.id.name, known.path, done, known.id.digest)

    def may_be_loaded(self, adapter: AdapterId) -> bool:
        """Returns whether a worker has the adapter or may still load it, so that waiting makes sense."""
        attached = [replica.adapters for replica in self._replicas.values()]
        if not attached:
            return True
        if adapter not in self._known:
            return False
        return any((own.can_load and adapter not in own.rejected) or adapter in own.loaded for own in attached)

    def unload_unused(self) -> None:
        """Unloads adapters that are no longer offered and have no users; called periodically."""
        for known in [known for known in self._known.values() if known.leaving]:
            if not self._num_users(known.id):
                del self._known[known.id]
                self._unloaded[known.id] = None
                for replica in self._replicas.values():
                    replica.adapters.unload(known.id)
                log.info("adapter unloaded", adapter=known.id.name, digest=known.id.digest.hex()[:16])
        while len(self._unloaded) > MAX_REMEMBERED_UNLOADED:
            del self._unloaded[next(iter(self._unloaded))]

    # Operators.

    async def load(self, request: pb.LoadAdapterRequest, model_name: str) -> pb.LoadAdapterResponse:
        """Loads an adapter on every worker and offers it to frontends; an adapter of the same name is replaced.
        Raises QuireError; then no worker has it."""
        async with self._loading:
            replicas = self._load_targets(request, model_name)
            late = self._late = []
            try:
                outcomes = await self._load_on(request, replicas)
                adapter = self._agreed_adapter(outcomes)
                self._offer(adapter, request.path)
            finally:
                self._late = None
                for replica, outcome in late:
                    self._handle_late_outcome(replica, outcome)
            self._complete()  # workers that attached meanwhile
            num_workers = sum(outcome == adapter for outcome in outcomes.values())
            log.info("adapter loaded", adapter=adapter.name, digest=adapter.digest.hex()[:16], workers=num_workers)
            return pb.LoadAdapterResponse(digest=adapter.digest, num_workers=num_workers)

    async def unload(self, name: str) -> pb.UnloadAdapterResponse:
        """Stops offering an adapter; workers unload it when its last sequence has ended. Returns the number of
        sequences that still use it. Raises NotFound, or FailedPrecondition if workers cannot unload."""
        async with self._loading:
            known = next((known for known in self._known.values() if known.id.name == name and not known.leaving), None)
            if known is None:
                raise NotFound(f"lora_name: the adapter {name!r:.80} does not exist", field="lora_name")
            if not all(replica.adapters.can_load for replica in self._replicas.values()):
                raise _not_offered()
            known.leaving = True
            num_users = self._num_users(known.id)
            self.unload_unused()
            return pb.UnloadAdapterResponse(num_sequences=num_users)

    def list_adapters(self) -> pb.ListAdaptersResponse:
        """Returns the known adapters by name, those that are being unloaded included, with their numbers of workers
        and sequences."""
        response = pb.ListAdaptersResponse()
        for known in sorted(self._known.values(), key=lambda known: known.id):
            response.adapters.add(
                name=known.id.name,
                path=known.path,
                digest=known.id.digest,
                num_workers=sum(known.id in replica.adapters.loaded for replica in self._replicas.values()),
                num_sequences=self._num_users(known.id),
                leaving=known.leaving,
            )
        return response

    def _load_targets(self, request: pb.LoadAdapterRequest, model_name: str) -> list[AdapterWorker]:
        """Returns the workers that have to load the adapter. Raises QuireError if the request is invalid or cannot be
        served."""
        name, path = request.name, request.path
        if not name or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
            text = f"lora_name: must have 1 to {MAX_NAME_LENGTH} printable characters, got {name!r:.80}"
            raise InvalidArgument(text, field="lora_name")
        if not path or "\0" in path or len(path) > MAX_PATH_LENGTH:
            raise InvalidArgument(f"lora_path: {path!r:.80} must be the path of a folder", field="lora_path")
        if name == model_name:
            raise InvalidArgument(
                f"lora_name: {name!r} is the name of the model; choose another one", field="lora_name"
            )
        if name in self.offered and not request.replace:
            text = f"lora_name: {name!r} is already loaded; replace it with load_inplace=true"
            raise InvalidArgument(text, field="lora_name")
        if len(self.offered) >= MAX_OFFERED and name not in self.offered:
            raise ResourceExhausted(f"lora_name: {MAX_OFFERED} adapters are loaded, which is the maximum; unload one")
        replicas = [replica for replica in self._replicas.values() if not replica.leaving]
        if not replicas:
            raise Unavailable("no worker is attached that could load an adapter", retry_after_ms=1000)
        if not all(replica.adapters.can_load for replica in replicas):
            raise _not_offered()
        return replicas

    async def _load_on(
        self, request: pb.LoadAdapterRequest, replicas: list[AdapterWorker]
    ) -> dict[AdapterWorker, Outcome]:
        """Orders the load on each worker, in a slot that is freed if necessary, and returns the outcomes by worker.
        Raises Unavailable after LOAD_TIMEOUT_S; then, and if it is cancelled, the loads are undone."""
        loop = asyncio.get_running_loop()
        waiting: dict[AdapterWorker, asyncio.Future[Outcome]] = {replica: loop.create_future() for replica in replicas}
        for replica, future in waiting.items():
            if not self._free_slot(replica):
                text = f"all {replica.adapters.capacity} adapter slots (max_loras) are in use"
                future.set_result(ResourceExhausted(text, field="lora_name", retry_after_ms=1000))
                continue
            replica.adapters.load(request.name, request.path, self._resolver(replica, future))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await asyncio.gather(*waiting.values())
        except TimeoutError:
            pending = ", ".join(replica.id for replica, future in waiting.items() if not _is_there(future))
            self._undo({replica: future.result() for replica, future in waiting.items() if _is_there(future)})
            raise Unavailable(f"{pending} did not load the adapter within {LOAD_TIMEOUT_S:g} s") from None
        except asyncio.CancelledError:
            self._undo({replica: future.result() for replica, future in waiting.items() if _is_there(future)})
            raise
        return {replica: future.result() for replica, future in waiting.items()}

    def _resolver(self, replica: AdapterWorker, future: asyncio.Future[Outcome]) -> Callable[[Outcome], None]:
        """Returns a callback that sets `future` to the outcome of a load; an outcome after the end of the future is
        handled as late."""

        def done(outcome: Outcome) -> None:
            """Sets the future to the outcome; an outcome that no call waits for any more is handled as late."""
            if not future.done():
                future.set_result(outcome)
            else:
                self._handle_late_outcome(replica, outcome)

        return done

    def _handle_late_outcome(self, replica: AdapterWorker, outcome: Outcome) -> None:
        """Handles an outcome that no call waits for: the worker unloads the adapter, unless it is offered by now."""
        if self._late is None:
            self._undo({replica: outcome})
        else:
            self._late.append((replica, outcome))

    def _agreed_adapter(self, outcomes: dict[AdapterWorker, Outcome]) -> AdapterId:
        """Returns the adapter that all attached workers have loaded. Otherwise undoes the loads and raises the
        reason."""
        attached = {
            replica: outcome for replica, outcome in outcomes.items() if self._replicas.get(replica.id) is replica
        }
        loaded = {outcome for outcome in attached.values() if isinstance(outcome, AdapterId)}
        refusals = {replica: outcome for replica, outcome in attached.items() if isinstance(outcome, QuireError)}
        if not refusals and len(loaded) == 1:
            return loaded.pop()
        self._undo(attached)
        for replica, refusal in refusals.items():
            raise type(refusal)(
                f"{replica.id}: {refusal.message}", field=refusal.field, retry_after_ms=refusal.retry_after_ms
            )
        if loaded:
            text = "lora_path: workers read different contents from it: " + ", ".join(
                replica.id for replica in attached
            )
            raise FailedPrecondition(text, field="lora_path")
        raise Unavailable("all workers that were loading the adapter have disconnected", retry_after_ms=1000)

    def _undo(self, outcomes: Mapping[AdapterWorker, Outcome]) -> None:
        """Has workers unload adapters that they have just loaded, except known ones and those whose name is being
        loaded again."""
        for replica, outcome in outcomes.items():
            if not isinstance(outcome, AdapterId) or outcome in self._known:
                continue
            if not replica.adapters.is_loading(
                outcome.name
            ):  # the unload would be executed after that order, and remove its adapter
                replica.adapters.unload(outcome)

    def _offer(self, adapter: AdapterId, path: str) -> None:
        """Offers an adapter to frontends from now on; another one of the same name is no longer offered."""
        for known in self._known.values():
            known.leaving = known.leaving or known.id.name == adapter.name
        self._known[adapter] = KnownAdapter(adapter, path)
        self._unloaded.pop(adapter, None)


def _is_there(future: asyncio.Future[Outcome]) -> bool:
    return future.done() and not future.cancelled()


def _not_offered() -> FailedPrecondition:
    text = "lora_folders: the workers were started without it, so adapters cannot be loaded or unloaded at run time"
    return FailedPrecondition(text, field="lora_folders")
