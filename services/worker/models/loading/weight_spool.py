"""Spools a streamed checkpoint to a file, which ranks and a worker that wakes up read like any other."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from quire.services.worker.models.loading import shared_content
from quire.shared.errors import InvalidArgument, ResourceExhausted
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, TensorHead, WeightsPiece
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.tensor_headers import DEFAULT_GROUP

FILE = "model.safetensors"
ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
MOST_TENSORS = 1 << 20
LONGEST_NAME = 512
MOST_DIMENSIONS = 8
MOST_TIMEOUT_MS = 540_000  # of a broadcast; shorter than the timeout of an order
GIB = 1 << 30


class WeightSpool:
    """Folder below the system's temporary folder (TMPDIR) that keeps at most two streams: the last and the active
    one."""

    def __init__(self, most_bytes: int, in_use: Callable[[], str], parent: Path | None = None) -> None:
        """Creates the spool; its folder is made with the first stream and deleted at exit.

        `most_bytes`: limit of a stream; `in_use`: returns the folder of the active stream; `parent`: folder in place
        of the system's temporary one.
        """
        self._most_bytes, self._in_use = most_bytes, in_use
        self._parent = parent
        self._root: Path | None = None

    @contextmanager
    def open_stream(self) -> Iterator[SpooledStream]:
        """Opens a stream, one at a time; on exit it is deleted unless kept, and a kept one replaces all but the active
        one.

        Raises ResourceExhausted if it cannot be written, also from within the block.
        """
        try:
            with self._in_folder() as spooling:
                yield spooling
        except OSError as error:
            reason = error.strerror or str(error)
            text = (
                f"a stream of weights cannot be stored: {reason}; set TMPDIR of the worker to a folder with free space"
            )
            raise ResourceExhausted(text) from None

    @contextmanager
    def _in_folder(self) -> Iterator[SpooledStream]:
        """Opens a stream in a new folder; on exit closes it and deletes either this folder or the superseded ones."""
        if self._root is None or not self._root.exists():  # temporary folders may have been cleaned up
            self._root = Path(tempfile.mkdtemp(prefix="quire-weights-", dir=self._parent))
            atexit.register(shutil.rmtree, self._root, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=self._root))
        spooling = SpooledStream(folder, self._most_bytes)
        try:
            yield spooling
        finally:
            with suppress(OSError):  # close() retries a failed write
                spooling.close()
            if not spooling.is_kept:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._forget_but(folder)

    def _forget_but(self, folder: Path) -> None:
        """Deletes all streams except this one and the active one."""
        assert self._root is not None
        for other in self._root.iterdir():
            if str(other) not in (str(folder), self._in_use()):
                shutil.rmtree(other, ignore_errors=True)


class SpooledStream:
    """Stream of weights written to a safetensors file: heads of all tensors, then their content, then the end.

    Usable from any thread, by one at a time.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._heads: dict[str, dict[str, Any]] = {}
        self._num_due = self._num_written = 0
        self._digest = hashlib.sha256()
        self._is_shared: bool | None = None  # None: no content received yet
        self._broadcast: BroadcastContent | None = None
        self._file: BinaryIO | None = None
        self.is_kept = False

    def append(self, piece: WeightsPiece) -> bool:
        """Appends a piece; returns whether it was the last one.

        Content in shared memory is read here. A broadcast is only noted (`expected`). Raises InvalidArgument for
        invalid, mixed or excess content.
        """
        match piece.WhichOneof("piece"):
            case "heads":
                for head in piece.heads.tensors:
                    self._add(head)
            case "content":
                self._check_kind(shared=False)
                self._write(piece.content)
                self._digest.update(piece.content)
            case "shared":
                self._check_kind(shared=True)
                for run in piece.shared.runs:
                    self._check_room(run.bytes)
                    for chunk in shared_content.chunks(piece.shared.host, run):
                        self._write(chunk)
            case "broadcast":
                self._check_kind(shared=True)
                if piece.broadcast.timeout_ms > MOST_TIMEOUT_MS:
                    text = f"timeout_ms: must be at most {MOST_TIMEOUT_MS}, got {piece.broadcast.timeout_ms}"
                    raise InvalidArgument(text, field="timeout_ms")
                self._broadcast = piece.broadcast
                self._broadcast.group_name = self._broadcast.group_name or DEFAULT_GROUP
            case "end":
                self._finish(piece.end)
                return True
            case _:
                raise InvalidArgument(
                    "piece: must have heads, content, a shared location, a broadcast, or the end", field="piece"
                )
        return False

    @property
    def expected(self) -> worker_pb2.ExpectedBroadcast | None:
        """Announced broadcast whose content arrives otherwise, so that nothing is kept; None for streams with
        content."""
        if self._broadcast is None:
            return None
        named = self._heads.items()
        heads = [TensorHead(name=name, dtype=head["dtype"], shape=head["shape"]) for name, head in named]
        return worker_pb2.ExpectedBroadcast(content=self._broadcast, tensors=heads)

    def keep(self) -> Path:
        """Marks the stream to be kept on exit of open_stream(); returns its folder."""
        self.is_kept = True
        return self._folder

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, head: TensorHead) -> None:
        """Adds the head of one tensor. Raises InvalidArgument for invalid or repeated names, unknown dtypes, too many
        bytes, and after content."""
        name = head.name
        if self._file is not None or len(self._heads) >= MOST_TENSORS:
            raise InvalidArgument(
                f"tensors: must be sent before all content, and be at most {MOST_TENSORS}", field="tensors"
            )
        if not name or len(name) > LONGEST_NAME or name in self._heads:
            what = "occurs twice" if name in self._heads else f"must have 1 to {LONGEST_NAME} characters"
            raise InvalidArgument(f"tensors: {name!r:.80} {what}", field="tensors")
        if head.dtype not in ELEMENT_BYTES or len(head.shape) > MOST_DIMENSIONS:
            known = ", ".join(ELEMENT_BYTES)
            text = f"tensors: {name:.80}: {head.dtype!r:.20} of {len(head.shape)} dimensions, not one of {known}"
            raise InvalidArgument(text, field="tensors")
        begin, size = self._num_due, math.prod(head.shape) * ELEMENT_BYTES[head.dtype]
        if begin + size > self._most_bytes:
            text = f"tensors: {(begin + size) / GIB:.1f} GiB or more, which exceeds every checkpoint of this model"
            raise InvalidArgument(text, field="tensors")
        self._num_due += size
        self._heads[name] = {"dtype": head.dtype, "shape": list(head.shape), "data_offsets": [begin, begin + size]}

    def _check_kind(self, *, shared: bool) -> None:
        """Records how content is sent. Raises InvalidArgument if that changes within an update: pieces, shared memory
        and a broadcast exclude each other."""
        if self._is_shared not in (None, shared) or self._broadcast is not None:
            text = (
                "piece: all content of an update must be sent the same way: in pieces, in shared memory or by broadcast"
            )
            raise InvalidArgument(text, field="piece")
        self._is_shared = shared

    def _check_room(self, num_bytes: int) -> None:
        """Raises InvalidArgument if more content comes than the heads announce."""
        if self._num_written + num_bytes > self._num_due:
            raise InvalidArgument(f"content: more than the {self._num_due} bytes of all tensors", field="content")

    def _write(self, content: bytes | memoryview) -> None:
        """Appends content to the file. Raises InvalidArgument if there is more than the heads announce."""
        self._check_room(len(content))
        self._begun().write(content)
        self._num_written += len(content)

    def _begun(self) -> BinaryIO:
        """Returns the file, positioned after what was written; the first call creates it with the header."""
        if self._file is None:
            header = json.dumps(self._heads).encode()
            header += b" " * (-len(header) % 8)
            self._file = (self._folder / FILE).open("wb")
            self._file.write(len(header).to_bytes(8, "little") + header)
        return self._file

    def _finish(self, digest: bytes) -> None:
        """Closes the file. Raises InvalidArgument for missing bytes or another SHA-256 digest than `digest`.

        The digest may be empty for shared memory and broadcasts, which are not hashed.
        """
        if self._broadcast is not None and not digest:
            return
        if self._num_written != self._num_due:
            text = f"content: {self._num_written} bytes for tensors of {self._num_due}"
            raise InvalidArgument(text, field="content")
        if not (self._is_shared and not digest) and digest != self._digest.digest():
            raise InvalidArgument("end: the received content differs from the sent content (checksum)", field="end")
        self._begun().close()
