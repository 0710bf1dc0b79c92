"""Raises at the n-th call that request handling makes: of a function, a class, a builtin, an __enter__.

Traces opcodes, so that nothing is patched: every acquisition of a resource is a call, and the exception comes before
it. Only functions that release resources are excluded, because the others rely on them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "BEFORE_WITH", "BEFORE_ASYNC_WITH"})


class Fault(Exception):
    """The injected exception."""


class Faults:
    """Counts the calls made by code under `folders`, and raises Fault at one of them."""

    def __init__(self, folders: tuple[Path, ...], *, not_in: frozenset[str], not_under: tuple[str, ...]) -> None:
        """`not_in`: qualified names of functions; `not_under`: parts of paths."""
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._not_in = not_in
        self._not_under = not_under
        self._at = 0
        self.num_calls = 0
        self.where = ""  # the last fault was raised

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Raises at call `number`; 0: only counts. Applies to this thread, to frames entered or resumed from now on."""
        self._at, self.num_calls, self.where = number, 0, ""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or not self._is_watched(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    @cache  # noqa: B019 - lives as long as the test
    def _is_watched(self, code: CodeType) -> bool:
        name = code.co_filename
        if not name.startswith(self._folders) or any(part in name for part in self._not_under):
            return False
        return code.co_qualname.removesuffix(".<listcomp>").removesuffix(".<genexpr>") not in self._not_in

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _calls(frame.f_code):
            self.num_calls += 1
            if self.num_calls == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                raise Fault(self.where)
        return self._step


@cache
def _calls(code: CodeType) -> frozenset[int]:
    """Returns the offsets of a code object's calls, except those of __exit__ at the end of a `with`, which release
    resources."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE", "NOP")]
    found = set()
    for i, step in enumerate(steps):
        leaves = (
            step.opname == "CALL"
            and step.arg == 2
            and all(s.opname == "LOAD_CONST" and s.argval is None for s in steps[max(0, i - 3) : i])
        )
        if step.opname in CALLS and not leaves:
            found.add(step.offset)
    return frozenset(found)
