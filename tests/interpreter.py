"""Without CUDA Triton's interpreter runs the kernels: it has to be asked before anything imports them.

Conftests of folders with such tests import this first. Half of its time goes into finding what it has found before,
and into questions whose answer nobody hears: that is replaced here. What it computes and checks stays the same.
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
    """For each call of a function, also within a kernel, it searches all of Triton's language for what it has to
    replace. That is searched for the first time only, and not at all where the caller has had it replaced."""
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def names(place: Any) -> list[str]:
        """Before anything of `place` was replaced."""
        return [name for name in dir(place) if core.is_builtin(getattr(place, name, None))]

    @functools.cache
    def samples(function: FunctionType) -> list[tuple[Any, str]]:
        """One member of each place in which things are replaced for it, all or none."""
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
    """The table of Numpy's types was made anew for each question, and the constants of a shape for each tensor."""
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
    """Of each sum of integers it asks, in seven operations of Triton's own, whether it overflows, and tells only who
    debugs."""
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


if not ON_GPU and importlib.util.find_spec("triton") is not None:
    _replace_once()
    _know_types()
    _ask_what_is_heard()
