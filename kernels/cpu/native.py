"""Bindings of the compiled library by ctypes. Calls release the GIL."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu import built, processor

I32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

# Arguments by letter, in the order of the entry points: n: rows, which vary between replays of a tape;
# i: another integer; f: a float; p: a pointer or None.
SIGNATURES = {
    "add_low_rank": "iiipppppp",
    "embed": "nippp",
    "embed_low_rank": "iiipppppp",
    "experts": "iniiiiffpppppppppppppppp",
    "gated_delta_rule": "iniiiiiiiiiiiippppppppppp",
    "gated_norm": "iniiifpppp",
    "head_linear": "iniiiiippp",
    "integer_linear": "niipppppp",
    "latent_attention": "iniiiiifppiippppp",
    "latent_store": "iniiiifppppppp",
    "linear": "iniipppp",
    "mask_logits": "nipppp",
    "paged_attention": "iniiiiiiiffpppppppppp",
    "qk_norm_rope_store": "iniiifppppppppp",
    "quantized_linear": "iniiifpppppppp",
    "rms_norm": "inifpppp",
    "route": "iniiiifiiipppp",
    "sample": "nipppppppp",
    "short_convolution": "iniiiiiipppppppp",
    "silu_mul": "inipp",
    "state_space_scan": "iniiiiiiiiiiipppppppppp",
}
_TYPES = {"n": ctypes.c_int64, "i": ctypes.c_int64, "f": ctypes.c_double, "p": ctypes.c_void_p}

# Dtypes that the library supports, by their number there. Others use the reference, as detected by the look-up that
# distinguishes float32 from bfloat16.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def load() -> tuple[ctypes.CDLL | None, str | None]:
    """Loads the library that suits this machine; returns it, or None and why it cannot be used."""
    directory = built.suitable()
    if directory is None:
        return None, built.unsuitable()
    try:
        return bind(ctypes.CDLL(str(directory / built.LIBRARY))), None
    except OSError as error:
        return None, str(error)


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the argument and result types of all functions of the library and returns it."""
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    for name, signature in SIGNATURES.items():
        declare(library, name, None, *(_TYPES[letter] for letter in signature))
    declare(library, "packed_bytes", integer, integer, integer, integer)
    declare(library, "has_codes", integer)
    declare(library, "has_integers", integer)
    declare(library, "pack_weight", None, integer, integer, integer, pointer, pointer)
    declare(library, "low_rank_spans", None, *[integer] * 3, pointer, pointer)
    declare(library, "ends_of_matches", None, *[integer] * 3, pointer, integer, *[pointer] * 3)
    declare(library, "prefer_huge_pages", None, pointer, integer)
    declare(library, "populate", None, pointer, integer)
    declare(library, "set_num_threads", None, integer)
    declare(library, "num_threads", integer)
    declare(library, "tape_new", pointer)
    declare(library, "tape_free", None, pointer)
    declare(library, "tape_add", integer, pointer, ctypes.c_char_p, integer, pointer, pointer)
    declare(library, "tape_replay", None, pointer, pointer)
    return library


def declare(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(library, f"quire_{name}")
    function.restype, function.argtypes = result, arguments


LIBRARY, UNAVAILABLE = load()

# Entry points and allocators that the functions call; a tape replaces them while it records.
calls = SimpleNamespace(empty=torch.empty, empty_like=torch.empty_like)
if LIBRARY is not None:
    LIBRARY.quire_set_num_threads(processor.usable_cores())
    for _name in SIGNATURES:
        setattr(calls, _name, getattr(LIBRARY, f"quire_{_name}"))


def unavailable() -> str | None:
    return UNAVAILABLE


def ends_of_matches(tokens: I32, slots: Rows, lengths: I32, shortest: int, longest: int) -> I32:
    """Returns where the earliest of the longest earlier matches of each slot's last tokens ends; 0: no match.

    Rows `slots` of `tokens` have `lengths` valid tokens; matches have `shortest` to `longest` tokens. Requires the
    library.
    """
    assert LIBRARY is not None
    assert tokens.strides[1] == tokens.itemsize
    slots, lengths = np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(lengths, np.int32)
    ends = np.empty(len(slots), np.int32)
    LIBRARY.quire_ends_of_matches(
        len(slots), shortest, longest, tokens.ctypes.data, tokens.strides[0] // tokens.itemsize,
        slots.ctypes.data, lengths.ctypes.data, ends.ctypes.data,
    )  # fmt: skip
    return ends


def set_num_threads(threads: int) -> None:
    """Sets the threads that share a kernel's work, including the caller; call between kernels. Results do not depend on
    it."""
    assert threads >= 1, threads
    if LIBRARY is not None:
        LIBRARY.quire_set_num_threads(threads)


def num_threads() -> int:
    return LIBRARY.quire_num_threads() if LIBRARY is not None else 1


def prefer_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """Requests huge pages for a KV cache before its first write: attention over long contexts then has fewer TLB
    misses."""
    if LIBRARY is not None:
        LIBRARY.quire_prefer_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


def populate(memory: torch.Tensor, begin: int, end: int) -> None:
    """Pre-faults the pages of these bytes, which the first write would otherwise wait for.

    Contents are kept; other threads may use the memory meanwhile.
    """
    if LIBRARY is not None and begin < end:
        LIBRARY.quire_populate(memory.data_ptr() + begin, end - begin)
