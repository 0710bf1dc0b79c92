"""Adapters are read and hashed in a thread of their own, beside the steps; those wanted last stay in host memory."""

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

ReadResult = tuple[PeftFolder, bytes] | QuireError  # with its digest, or why not


class AdapterReader:
    """One after the other, in the order that they were asked for."""

    def __init__(self, folders: AdapterFolders, most_kept: int = 0) -> None:
        """`most_kept`: adapters in host memory."""
        self._folders = folders
        self._most_kept = most_kept
        self._kept: OrderedDict[AdapterId, PeftFolder] = OrderedDict()  # used by one thread
        self._thread: BackgroundThreads | None = None  # once something is to be read

    def read(self, name: str, path: str, digest: bytes, done: Callable[[ReadResult], None]) -> None:
        """`done` is called once, from that thread. `digest`: what it has to be; empty: whatever is there now."""
        if self._thread is None:
            self._thread = BackgroundThreads("adapters")
        self._thread.submit(lambda: done(self.find(name, path, digest)))

    def find(self, name: str, path: str, digest: bytes) -> ReadResult:
        """The same in the caller's thread: for one that never calls read()."""
        kept = self._kept.get(AdapterId(name, digest))
        if kept is not None:
            self._kept.move_to_end(AdapterId(name, digest))
            return kept, digest
        try:
            folder = self._folders.read(name, path)
            found = folder.digest()
        except QuireError as error:
            return error
        except BaseException as error:  # a library in Rust raises what is no Exception
            log.exception("an adapter could not be read", adapter=name)
            return Internal(f"lora: {name}: {type(error).__name__} while reading {path!r}")
        if digest and found != digest:
            return FailedPrecondition(f"lora: {name}: {path!r} has another content now", field="lora_path")
        self._kept[AdapterId(name, found)] = folder
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        return folder, found
