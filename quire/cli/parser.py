"""Parser of a command's line, whose errors are one line that names what was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

LIKELY = 0.7  # similarity of two names from which on one may be the other, misspelled


class CommandParser(argparse.ArgumentParser):
    """`explain`: returns what is said of a flag that this parser does not know; empty for nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.explain: Callable[[str], str] = lambda _flag: ""

    def error(self, message: str) -> NoReturn:
        """Without the usage, which takes a hundred lines where there are as many flags."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists what there is)\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Ends with what is wrong with the first of `words`, which were left over."""
        flag = next((word for word in words if word.startswith("-")), "")
        if not flag:
            self.error(f"unexpected argument: {words[0]}")
        if explained := self.explain(flag):
            self.error(explained)
        near = self._near(flag.partition("=")[0])
        self.error(f"unrecognized argument: {flag}" + (f"; did you mean {near}?" if near else ""))

    def _near(self, flag: str) -> str:
        shown = [
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        ]
        wanted = "--" + flag.lstrip("-").replace("_", "-").lower()
        return next(iter(difflib.get_close_matches(wanted, shown, 1, LIKELY)), "")
