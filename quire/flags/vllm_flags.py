"""Handles vLLM's flags that `quire up` does not have: each is accepted, or refused with advice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from quire.flags.parser import CommandParser
from quire.flags.vllm_accepted_flags import ACCEPTED_VALUES, IGNORED_FLAGS, SHORT, SYNONYMS
from quire.flags.vllm_flag_table import REFUSED

SWITCHES = (
    "--disable-",
    "--enable-",
    "--enforce-",
    "--return-",
    "--trust-",
    "--use-",
)  # prefixes of switches with a --no- form


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags without listing them in help. Flags that the parser already has are unchanged."""
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for flag in REFUSED.keys() - taken:
        _add(parser, flag, "*", _Refused)
        if flag.startswith(SWITCHES):
            _add(parser, f"--no-{flag[2:]}", 0, _Anyway)
    for flag in IGNORED_FLAGS - taken:
        _add(parser, flag, 0, _Anyway)
        if (negated := f"--no-{flag[2:]}") not in REFUSED:
            _add(parser, negated, 0, _Anyway)
    for flag in ACCEPTED_VALUES.keys() - taken:
        _add(parser, flag, None, _IfValue)
    for flag, other in SHORT.items():
        parser._option_string_actions[flag] = parser._option_string_actions[other]
    for flag, other in SYNONYMS.items():
        parser._option_string_actions[flag] = parser._option_string_actions[other]
    if isinstance(parser, CommandParser):
        parser.explain = answer


def _add(parser: argparse.ArgumentParser, flag: str, values: str | int | None, action: type[argparse.Action]) -> None:
    parser.add_argument(flag, nargs=values, action=action, help=argparse.SUPPRESS, default=argparse.SUPPRESS)


def answer(flag: str) -> str:
    """Returns advice for a flag that no parser knows in this form; empty if it is not vLLM's: with underscores, with
    an additional dash (--cc), or with part of its value in its name (--compilation-config.mode, -O3)."""
    name = flag.partition("=")[0].partition(".")[0].replace("_", "-")
    name = "-O" if name.startswith("-O") and name[2:].isdigit() else name
    known = SHORT.get(name, SHORT.get(name.replace("--", "-", 1), name))
    instead = REFUSED.get(known, "")
    return _refusal(name, instead) if instead else ""


def _refusal(flag: str, instead: str) -> str:
    use = "use " if instead.startswith("--") else ""
    return f"{flag} is a flag of vLLM that Quire does not have; {use}{instead}"


class _Refused(argparse.Action):
    """Action of a flag that is not supported: parsing ends with an error and advice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(_refusal(option_string or "", REFUSED[self.option_strings[0]]))


class _Anyway(argparse.Action):
    """Action of a flag that is accepted without effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Ignores the flag: what it requests is already the case, or it disables something that does not exist."""


class _IfValue(argparse.Action):
    """Action of a flag that is accepted with some values; others end parsing with an error and advice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        fine, instead = ACCEPTED_VALUES[self.option_strings[0]]
        if instead and values not in fine:
            parser.error(_refusal(f"{option_string} {values}", instead))
