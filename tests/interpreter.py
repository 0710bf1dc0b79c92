"""Without CUDA Triton's interpreter runs the kernels: it has to be asked before anything imports them.

Conftests of folders with such tests import this first.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def _search_once() -> None:
    """For each call of a function the interpreter searches all of Triton's language for what it has to replace, which
    takes a third of its time. What there is does not change: it is searched for the first time only."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names(place: Any) -> list[str]:
        """Before anything of `place` was replaced."""
        return [name for name in dir(place) if is_builtin(getattr(place, name, None))]

    def patch_builtin(place: Any, *more: Any) -> None:
        for name in names(place):
            member = getattr(place, name)
            if is_builtin(member):
                interpreter._patch_attr(place, name, member, *more)

    interpreter._patch_builtin = patch_builtin


if not ON_GPU and importlib.util.find_spec("triton") is not None:
    _search_once()
