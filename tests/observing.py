"""Observes calls of functions without replacing anything: the functions run as they are."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any


@dataclass(slots=True)
class ObservedCall:
    """A call: the function's name, the arguments by name, and the result once it has returned."""

    name: str
    arguments: dict[str, Any]
    result: Any = None


def _ignore(call: ObservedCall) -> None:
    """Does nothing."""


@contextmanager
def calls_of(
    *functions: Callable[..., Any],
    on_call: Callable[[ObservedCall], None] = _ignore,
    on_return: Callable[[ObservedCall], None] = _ignore,
) -> Iterator[list[ObservedCall]]:
    """Yields the list of calls of `functions`, which grows with each call, in this thread and in threads that are
    started meanwhile. A coroutine counts once, when it begins; its result is not recorded.

    `on_call`, `on_return`: called with each call when it begins, and when it has returned.
    """
    codes = {_code_of(function): function.__name__ for function in functions}
    calls: list[ObservedCall] = []
    running: dict[FrameType, ObservedCall] = {}

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        name = codes.get(frame.f_code)
        if name is None:
            return
        if event == "call" and frame not in running:
            running[frame] = call = ObservedCall(name, dict(frame.f_locals))
            calls.append(call)
            on_call(call)
        elif event == "return" and not frame.f_code.co_flags & inspect.CO_COROUTINE:
            call = running.pop(frame)
            call.result = argument
            on_return(call)

    before = sys.getprofile()
    sys.setprofile(observe)
    threading.setprofile(observe)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def _code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__  # type: ignore[attr-defined]
    return code
