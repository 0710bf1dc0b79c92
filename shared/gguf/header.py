"""Reads the header of a GGUF file: metadata by key, and the location of each tensor.

The contents are not trusted: every count is compared with the size of the file before memory is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from quire.shared.errors import InvalidArgument
from quire.shared.gguf.kinds import KINDS, UNSUPPORTED_KINDS, ElementKind

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_HEADER_BYTES = 256 << 20  # a vocabulary of 262,144 tokens with merges takes 15 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 21  # total over all arrays
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Location and type of one tensor; `shape` is outermost first, as in torch."""

    path: Path
    name: str
    kind: ElementKind
    shape: tuple[int, ...]
    start: int  # offset in the file, in bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key and tensors by name of one model, whose parts may be several files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def refusal(self, reason: str) -> InvalidArgument:
        return refusal(self.path, reason)


def refusal(path: Path, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model: {path}: {reason}", field="model")


def read_header(path: Path) -> Header:
    """Reads a file's header. Raises InvalidArgument for a file that is not GGUF, is truncated, or declares more than
    it can contain."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Reader(path, mapped).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise refusal(path, f"cannot read it: {error}") from None


class _Reader:
    """Parses a file's bytes sequentially from its beginning; every read is bounded by the file and by the maximum
    header size."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped, self._at = path, mapped, 0
        self._size = len(mapped)
        self._items = 0

    def header(self) -> Header:
        """Reads the complete header. Raises InvalidArgument for another format or version, duplicates, or counts
        beyond the limits."""
        if self._take(4, "its first bytes") != MAGIC:
            self._refuse("it is not a GGUF file")
        version = self._number("I", "its version")
        if version not in VERSIONS:
            there_are = ", ".join(map(str, VERSIONS))
            self._refuse(f"version {version} of GGUF (or another byte order); supported: {there_are}")
        num_tensors = self._count("Q", MAX_TENSORS, "tensors")
        num_keys = self._count("Q", MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a key", MAX_NAME_BYTES)
            if key in metadata:
                self._refuse(f"it contains {key} twice")
            metadata[key] = self._value(key)
        places = [self._place() for _ in range(num_tensors)]
        return Header(self._path, metadata, self._placed(places, metadata))

    def _placed(self, places: list[TensorPlace], metadata: Mapping[str, Any]) -> dict[str, TensorPlace]:
        """Returns the tensors by name with absolute offsets. Raises InvalidArgument if they are not aligned,
        overlap, exceed the file or occur twice."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {alignment!r}: a power of two is needed")
        base = -(-self._at // alignment) * alignment
        end, tensors = base, {}
        for place in sorted(places, key=lambda place: place.start):
            start = base + place.start
            if start % alignment or start < end:
                self._refuse(f"tensor {place.name} begins at {place.start}, inside of another or not aligned")
            end = start + place.num_bytes
            if end > self._size:
                self._refuse(f"tensor {place.name} ends at byte {end}, and the file has {self._size}: it is cut off")
            tensors[place.name] = replace(place, start=start)
        if len(tensors) < len(places):
            self._refuse("it contains a tensor twice")
        return tensors

    def _place(self) -> TensorPlace:
        """Reads one tensor's entry; its `start` is relative to the tensor section."""
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        dims = self._count("I", MAX_DIMENSIONS, f"dimensions of {name}")
        shape = tuple(reversed([self._number("Q", f"the shape of {name}") for _ in range(dims)]))
        number = self._number("I", f"the type of {name}")
        kind = KINDS.get(number)
        if kind is None:
            called = UNSUPPORTED_KINDS.get(number, "unknown")
            there_are = ", ".join(kind.name for kind in KINDS.values())
            self._refuse(f"tensor {name} has type {number} ({called}); supported: {there_are}")
        start = self._number("Q", f"the place of {name}")
        count = math.prod(shape)
        if not shape or not count or shape[-1] % kind.block_size:
            self._refuse(f"tensor {name} has shape {list(shape)}, which {kind.name} cannot have")
        return TensorPlace(self._path, name, kind, shape, start, count // kind.block_size * kind.block_bytes)

    def _value(self, key: str) -> Any:
        """Reads a metadata value with its type: a number, a text or a list. Raises InvalidArgument for an unknown
        type."""
        number = self._number("I", f"the type of {key}")
        if number in NUMBERS:
            return self._number(NUMBERS[number], key)
        if number == STRING:
            return self._text(key)
        if number != ARRAY:
            self._refuse(f"{key} has a value of type {number}, which GGUF does not have")
        return list(self._items_of(key))

    def _items_of(self, key: str) -> Iterator[Any]:
        """Reads the items of an array, whose total number over the file is limited; texts are read lazily, while the
        result is iterated."""
        number = self._number("I", f"the type of {key}")
        count = self._count("Q", MAX_ITEMS - self._items, f"items of {key}")
        self._items += count
        if number == STRING:
            return (self._text(key) for _ in range(count))
        if number not in NUMBERS:
            self._refuse(f"{key} is an array of type {number}; supported: numbers and texts")
        layout = f"<{count}{NUMBERS[number]}"
        return iter(struct.unpack(layout, self._take(struct.calcsize(layout), key)))

    def _text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        size = self._count("Q", most, f"bytes of {what}")
        return self._take(size, what).decode(errors="replace")

    def _count(self, layout: str, most: int, of: str) -> int:
        """Reads a number and returns it. Raises InvalidArgument if it exceeds `most`."""
        count = self._number(layout, f"the number of {of}")
        if count > most:
            self._refuse(f"it names {count} {of}; at most {most} are read")
        return int(count)

    def _number(self, layout: str, what: str) -> Any:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}"), what))[0]

    def _take(self, size: int, what: str) -> bytes:
        """Returns the next `size` bytes and advances. Raises InvalidArgument beyond the end of the file or the limit
        of a header; `what` names the bytes in the error."""
        end = self._at + size
        if end > self._size:
            self._refuse(f"it is cut off in {what}: {end} bytes are needed, it has {self._size}")
        if end > MAX_HEADER_BYTES:
            self._refuse(f"its header is larger than {MAX_HEADER_BYTES} bytes")
        taken, self._at = self._mapped[self._at : end], end
        return taken

    def _refuse(self, reason: str) -> NoReturn:
        raise refusal(self._path, reason)


Check = Callable[[Any], bool]


class Values:
    """Typed access to a file's metadata; raises InvalidArgument for a missing key or a wrong type."""

    def __init__(self, header: Header) -> None:
        self._header = header

    def __contains__(self, key: str) -> bool:
        return key in self._header.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._checked_value(
            key, default, "a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)
        )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._checked_value(key, default, "a finite number", _is_number))

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._checked_value(key, default, "a text", lambda v: isinstance(v, str))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._checked_value(key, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value: list[str] = self._checked_value(key, default, "a list of texts", _all(lambda v: isinstance(v, str)))
        return value

    def numbers(self, key: str, default: list[float] | None = None) -> list[float]:
        value: list[float] = self._checked_value(key, default, "a list of finite numbers", _all(_is_number))
        return value

    def _checked_value(self, key: str, default: Any, wanted: str, fits: Check) -> Any:
        """Returns the value of a key or `default`. Raises InvalidArgument, with `wanted` as the expected type, if
        the key is missing without a default or the value does not fit."""
        value = self._header.metadata.get(key, default)
        if value is None:
            raise self._header.refusal(f"it lacks the key {key}")
        if not fits(value):
            shown = repr(value)
            raise self._header.refusal(f"{key} is {shown[:80]}{'...' * (len(shown) > 80)}: {wanted} is needed")
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _all(fits: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(fits, value))
