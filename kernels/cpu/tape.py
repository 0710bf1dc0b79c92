"""A forward pass as a list of calls that C replays, like a CUDA graph (docs/design/cpu-kernels.md shows its use)."""

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

# What model code may do to tensors between kernels while a tape records: look at them differently. What computes or
# copies would happen once, now, and be missing from every replay.
VIEWS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "chunk", "detach", "expand", "narrow", "permute", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    )
)  # fmt: skip


class Tape:
    """Records the kernels that a model calls, once, and replays them at any smaller sizes.

    `largest` names the sizes that vary and gives the most of each, e.g. num_tokens=512, num_seqs=64. They must differ:
    while recording, a tensor's rows tell by their number which of them they follow.
    """

    def __init__(self, **largest: int) -> None:
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
        """Kernels called by this thread are noted instead of run; their results are places in the tape's own memory.

        Every tensor that the model reads or writes must have its largest size now and stay where it is: the tape keeps
        addresses. One recording per tape, and no kernels on other threads meanwhile.
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
        """Runs the calls with these sizes, in one call of C: rows beyond them are neither read nor written."""
        for number, (name, most) in enumerate(self.largest.items()):
            assert 0 <= sizes[name] <= most, f"{name} = {sizes[name]}, recorded for {most}"
            self._sizes[number] = sizes[name]
        LIBRARY.quire_tape_replay(self._handle, self._sizes)

    @property
    def num_bytes(self) -> int:
        """Of memory for results."""
        return self._arena.num_bytes

    def _recorder(self, name: str):
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
        assert rows in self._number, f"{name} has {rows} rows, which is none of {self.largest}"
        return self._number[rows]


class Arena:
    """Memory for the results of a recording. What the model has let go of is given to later results."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: list[ctypes.Array] = []

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(*tensor.shape, dtype=tensor.dtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        memory = self._take(max(count * dtype.itemsize, 1))
        start = -ctypes.addressof(memory) % ALIGNMENT
        # A tensor over a buffer keeps the buffer, and with it the memory, as long as any view of it lives.
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_buffer(memory, start)
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    def _take(self, num_bytes: int) -> ctypes.Array:
        """The smallest free piece that fits and is not wasted on it, or a new one."""
        least = num_bytes + ALIGNMENT
        fitting = [memory for memory in self._free if least <= len(memory) <= 2 * least]
        if fitting:
            best = min(fitting, key=len)
            self._free[:] = [memory for memory in self._free if memory is not best]
            return best
        self.num_bytes += least
        return (ctypes.c_char * least)()


class OnlyViews(TorchDispatchMode):
    """Refuses what a replay would leave out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler at the first call, only to keep away from this one: 1.3 s."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in VIEWS:
            return func(*args, **kwargs)
        with self:  # what is made of others comes here whole in inference mode: flatten, reshape
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise RuntimeError(f"{func} cannot be recorded on a tape: use a function of kernels, or call it outside")
        return result
