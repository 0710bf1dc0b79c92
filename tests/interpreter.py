"""Selects Triton's interpreter without CUDA, which must happen before Triton is imported.

Conftests of folders with such tests import this first. It also caches lookups and skips checks without effect that
take half of the interpreter's time; results and checks stay the same.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def _replace_once() -> None:
    """Caches the interpreter's search through Triton's language for objects to replace, which it repeats for each
    call."""
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def names(place: Any) -> list[str]:
        """Returns the names in `place` before any replacement."""
        return [name for name in dir(place) if core.is_builtin(getattr(place, name, None))]

    @functools.cache
    def samples(function: FunctionType) -> list[tuple[Any, str]]:
        """Returns one member of each place whose members are replaced together."""
        seen = [place for place in function.__globals__.values() if place is language or place is core]
        return [(language.tensor, "__add__"), *((place, "load") for place in seen)]

    def patch_builtin(place: Any, *more: Any) -> None:
        for name in names(place):
            member = getattr(place, name)
            if core.is_builtin(member):
                interpreter._patch_attr(place, name, member, *more)

    def patch_lang(function: FunctionType) -> Any:
        is_to_do = any(core.is_builtin(getattr(place, name)) for place, name in samples(function))
        return patch(function) if is_to_do else interpreter._LangPatchScope()

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang


def _know_types() -> None:
    """Caches the table of numpy types and the constants of a tensor's shape."""
    from triton.language import core
    from triton.runtime import interpreter

    ask = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def np_dtype(of: Any) -> np.dtype[Any]:
        name = of.scalar.name
        if name not in known:
            known[name] = ask(of)
        return known[name]

    @functools.cache
    def constants(*shape: int) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(length) for length in shape])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(*(type.shape if type.is_block() else ()))

    interpreter._get_np_dtype = np_dtype
    core.tensor.__init__ = tensor


def _ask_what_is_heard() -> None:
    """Skips the overflow check of integer sums, which takes seven operations and is reported only in debug mode."""
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


if not ON_GPU and importlib.util.find_spec("triton") is not None:
    _replace_once()
    _know_types()
    _ask_what_is_heard()
