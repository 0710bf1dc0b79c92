"""Forward pass as a list of calls that C replays, like a CUDA graph (docs/design/cpu-kernels.md)."""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu.native import LIBRARY, SIGNATURES, calls

FIXED = -1
ALIGNMENT = 64

# Operations allowed between kernels while a tape records: views. Computing or copying operations
# would run once while recording and be missing from every replay.
VIEWS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "chunk", "detach", "expand", "narrow", "permute", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    )
)  # fmt: skip


class Tape:
    """Records the kernels that a model calls once and replays them at any smaller sizes.

    `largest` names the sizes that vary and their maxima, e.g. num_tokens=512, num_seqs=64. They have to differ: while
    recording, the number of a tensor's rows identifies the size.
    """

    def __init__(self, **largest: int) -> None:
        """Creates an empty tape in the library, freed with this object. `largest`: maximum of each size by name, all
        different."""
        assert LIBRARY is not None, "the library is unavailable"
        assert len(set(largest.values())) == len(largest), f"sizes must differ: {largest}"
        self.largest = largest
        self.num_calls = 0
        self._handle = LIBRARY.quire_tape_new()
        self._sizes = (ctypes.c_int64 * len(largest))(*largest.values())
        self._number = {rows: number for number, rows in enumerate(largest.values())}
        self._arena = Arena()
        weakref.finalize(self, LIBRARY.quire_tape_free, self._handle)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the kernels called by this thread instead of running them; results are in the tape's memory.

        Every tensor that the model reads or writes must have its maximum size now and keep its address. One recording
        per tape, and no kernels on other threads meanwhile.
        """
        assert self.num_calls == 0, "a tape records once"
        before = dict(vars(calls))
        vars(calls).update(
            {name: self._recorder(name) for name in SIGNATURES},
            empty=self._arena.empty,
            empty_like=self._arena.empty_like,
        )
        try:
            with OnlyViews():
                yield
        finally:
            vars(calls).update(before)

    def replay(self, **sizes: int) -> None:
        """Runs the recorded calls with these sizes, each at most its maximum, in one C call; rows beyond them are
        neither read nor written."""
        for number, (name, most) in enumerate(self.largest.items()):
            assert 0 <= sizes[name] <= most, f"{name} = {sizes[name]}, recorded for {most}"
            self._sizes[number] = sizes[name]
        LIBRARY.quire_tape_replay(self._handle, self._sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory for results."""
        return self._arena.num_bytes

    def _recorder(self, name: str):
        """Returns a function that adds a call of `name` to the tape instead of running it; arguments that equal a
        size's maximum vary at replay."""
        signature = SIGNATURES[name]

        def record(*arguments) -> None:
            words, sizes = [], []
            for letter, argument in zip(signature, arguments, strict=True):
                words.append(struct.unpack("q", struct.pack("d", argument))[0] if letter == "f" else int(argument or 0))
                sizes.append(self._size_number(name, argument) if letter == "n" else FIXED)
            count = len(words)
            added = LIBRARY.quire_tape_add(
                self._handle, name.encode(), count, (ctypes.c_int64 * count)(*words), (ctypes.c_int8 * count)(*sizes)
            )
            assert added == 0, name
            self.num_calls += 1

        return record

    def _size_number(self, name: str, rows: int) -> int:
        """Returns the index of the size whose maximum is `rows`; asserts that there is one."""
        assert rows in self._number, f"{name} has {rows} rows, which is none of {self.largest}"
        return self._number[rows]


class Arena:
    """Allocator of a recording's results; memory freed by the model is reused for later results."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: list[ctypes.Array] = []

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(*tensor.shape, dtype=tensor.dtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a tensor aligned to ALIGNMENT; its memory is reused when no view of it is left."""
        count = math.prod(shape)
        memory = self._take(max(count * dtype.itemsize, 1))
        start = -ctypes.addressof(memory) % ALIGNMENT
        # A tensor over a buffer keeps the buffer, and thus the memory, alive as long as any view of it.
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_buffer(memory, start)
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    def _take(self, num_bytes: int) -> ctypes.Array:
        """Returns the smallest free piece that fits without waste, or a new one."""
        least = num_bytes + ALIGNMENT
        fitting = [memory for memory in self._free if least <= len(memory) <= 2 * least]
        if fitting:
            best = min(fitting, key=len)
            self._free[:] = [memory for memory in self._free if memory is not best]
            return best
        self.num_bytes += least
        return (ctypes.c_char * least)()


class OnlyViews(TorchDispatchMode):
    """Raises errors for operations that a replay would miss."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoids importing torch's compiler at the first call (1.3 s)."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs operations that only create views, decomposing composite ones; raises RuntimeError for any other."""
        kwargs = kwargs or {}
        if func.overloadpacket in VIEWS:
            return func(*args, **kwargs)
        with self:  # composite operations arrive undecomposed in inference mode: flatten, reshape
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise RuntimeError(f"{func} cannot be recorded on a tape: use a function of kernels, or call it outside")
        return result
