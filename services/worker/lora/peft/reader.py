"""Reads and hashes adapters in a background thread, and caches the most recently used ones in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from quire.services.worker.host.background import BackgroundThreads
from quire.services.worker.lora.peft.folders import AdapterFolders
from quire.services.worker.lora.peft.peft_folder import PeftFolder
from quire.shared.errors import FailedPrecondition, Internal, QuireError
from quire.shared.logs import logger
from quire.shared.models.adapter_ids import AdapterId

log = logger("worker.lora")

ReadResult = tuple[PeftFolder, bytes] | QuireError  # adapter and digest, or the error


class AdapterReader:
    """Reads and hashes adapters one after the other in a background thread, and caches the most recently used ones in
    host memory."""

    def __init__(self, folders: AdapterFolders, most_kept: int = 0) -> None:
        """`most_kept`: maximum adapters in host memory."""
        self._folders = folders
        self._most_kept = most_kept
        self._kept: OrderedDict[AdapterId, PeftFolder] = OrderedDict()  # used by one thread
        self._thread: BackgroundThreads | None = None  # started on first use

    def read(self, name: str, path: str, digest: bytes, done: Callable[[ReadResult], None]) -> None:
        """Reads an adapter in the background; calls `done` once, from that thread, with adapter and digest or with the
        error. `digest`: required content; empty: accepts the current one."""
        if self._thread is None:
            self._thread = BackgroundThreads("adapters")
        self._thread.submit(lambda: done(self.find(name, path, digest)))

    def find(self, name: str, path: str, digest: bytes) -> ReadResult:
        """Reads an adapter, or takes it from the cache, in the caller's thread, for callers that never use read().
        Returns errors instead of raising them: FailedPrecondition if the content is not that of `digest`."""
        kept = self._kept.get(AdapterId(name, digest))
        if kept is not None:
            self._kept.move_to_end(AdapterId(name, digest))
            return kept, digest
        try:
            folder = self._folders.read(name, path)
            actual = folder.digest()
        except QuireError as error:
            return error
        except BaseException as error:  # a panic in Rust is not an Exception
            log.exception("cannot read an adapter", adapter=name)
            return Internal(f"lora: {name}: {type(error).__name__} while reading {path!r}")
        if digest and actual != digest:
            return FailedPrecondition(f"lora: {name}: {path!r} has changed", field="lora_path")
        self._kept[AdapterId(name, actual)] = folder
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        return folder, actual
