"""Command-line parser: one-line errors with suggestions, grouped help, and flag files."""

from __future__ import annotations

import argparse
import difflib
import functools
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from quire.flags import config_file, help_pages
from quire.flags.groups import FlagGroup

LIKELY = 0.7  # similarity above which a name may be a misspelling of another
HELP = ("-h", "--help")


class CommandParser(argparse.ArgumentParser):
    """Parser of one command. `explain`: returns advice for a flag that this parser does not know; empty: none."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # argparse makes a formatter for each flag, which would ask the terminal for its width hundreds of times.
        formatter = functools.partial(argparse.HelpFormatter, width=shutil.get_terminal_size().columns - 2)
        super().__init__(*arguments, **{"formatter_class": formatter, **options})
        self.explain: Callable[[str], str] = lambda _flag: ""
        self._groups: Mapping[str, FlagGroup] = {}
        self._takes_config_file = False
        self._deprecated: dict[str, str] = {}  # flags by their earlier names
        self._place = ""  # place of the parsed words, if not the command line

    def group_flags(self, groups: Mapping[str, FlagGroup]) -> None:
        """Makes --help show one line per common flag, by group, and the other flags on request."""
        self._groups = groups
        self.add_argument(
            "--help-all", action="store_true", default=argparse.SUPPRESS, help="show every flag, by group"
        )

    def take_config_file(self) -> None:
        """Adds --config FILE: YAML whose keys are flag names; the command line takes precedence."""
        self.add_argument(
            "--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file whose keys are flag names"
        )
        self._takes_config_file = True

    def deprecate(self, old: str, new: str) -> None:
        """Accepts `old`, an earlier name of the flag `new`, with a warning; help does not list it."""
        self._deprecated[old] = new

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        return self._option_string_actions

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments after renaming deprecated flags and answering help. With --config, the file's flags are
        parsed first and those of the command line override them."""
        words = [self._current_name(word) for word in (sys.argv[1:] if args is None else args)]
        if self._groups:
            self._answer_help(words)
        if not self._takes_config_file:
            return super().parse_known_args(words, namespace)
        alone, left_over = super().parse_known_args(words, argparse.Namespace())
        path = getattr(alone, "config", None)
        if path is None:
            return self._merged(alone, namespace), left_over
        prepared = config_file.parsed(self, path, words, alone)
        return super().parse_known_args(words, self._merged(prepared, namespace))

    def parse_flag(self, words: Sequence[str], namespace: argparse.Namespace) -> None:
        """Parses one flag into `namespace`."""
        super().parse_known_args(words, namespace)

    def _current_name(self, word: str) -> str:
        """Returns the word with a deprecated flag replaced by its current name, after a warning on stderr."""
        flag, equals, value = word.partition("=")
        if flag not in self._deprecated:
            return word
        print(f"{self.prog}: warning: {flag} is deprecated; use {self._deprecated[flag]}", file=sys.stderr)
        return self._deprecated[flag] + equals + value

    def _merged(self, found: argparse.Namespace, namespace: argparse.Namespace | None) -> argparse.Namespace:
        """Copies the values into the namespace of the parent parser, if there is one, and returns the result."""
        if namespace is None:
            return found
        for name, value in vars(found).items():
            setattr(namespace, name, value)
        return namespace

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Prefixes errors with `place`, such as a file and line, within the block."""
        self._place = f"{place}: "
        try:
            yield
        finally:
            self._place = ""

    def error(self, message: str) -> NoReturn:
        """Exits with one line, without the usage, which would take a hundred lines."""
        hint = f"`{self.prog} --help` lists the available ones"
        self.exit(2, f"{self.prog}: error: {self._place}{message} ({hint})\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exits with an error for the first of the unparsed `words`."""
        flag = next((word for word in words if word.startswith("-")), "")
        if not flag:
            self.error(f"unexpected argument: {words[0]}")
        self.refuse_flag(flag, flag)

    def refuse_flag(self, flag: str, written: str) -> NoReturn:
        """Exits with an error for an unknown flag, with advice or the most similar flag; `written` is its spelling
        in the error."""
        if explained := self.explain(flag):
            self.error(explained)
        near = self._near(flag.partition("=")[0])
        self.error(f"unrecognized argument: {written}" + (f"; did you mean {near}?" if near else ""))

    def format_help(self) -> str:
        """Returns the short help: one line per common flag of each group. Parsers without groups have argparse's
        help."""
        if not self._groups:
            return super().format_help()
        listed = "\n".join(help_pages.overview(self._actions, self._groups))
        names = ", ".join(name for name, group in self._groups.items() if self._has_any(group))
        more = f"--help-all shows all flags, --help=FLAG one of them, --help=GROUP a group: {names}."
        parts = (
            f"usage: {self.prog}{self._operands()} [FLAG ...]",
            self.description,
            listed,
            textwrap.fill(more, help_pages.WIDTH),
            self.epilog,
        )
        return "\n\n".join(part for part in parts if part) + "\n"

    def _operands(self) -> str:
        found = [action for action in self._actions if not action.option_strings]
        return "".join(f" [{action.metavar or action.dest}]" for action in found)

    def _has_any(self, group: FlagGroup) -> bool:
        return any(f"--{name}" in self.flags for name in group.names)

    def _answer_help(self, words: Sequence[str]) -> None:
        """Prints the page for --help-all or --help=NAME and exits; returns if neither is among the words."""
        for word in words:
            name, _, wanted = word.partition("=")
            if word == "--help-all":
                self._show(help_pages.page(help_pages.sections(self._actions, self._groups), self.prog))
            if name in HELP and wanted:
                self._show(help_pages.page(self._wanted(wanted), self.prog))

    def _show(self, text: str) -> NoReturn:
        self._print_message(text, sys.stdout)
        self.exit()

    def _wanted(self, name: str) -> list[tuple[str, list[argparse.Action]]]:
        """Returns titles and flags for --help=NAME, a group or a flag; ends the process with suggestions for another
        name."""
        known = help_pages.by_name(self._actions)
        group = self._groups.get(name)
        if group is not None and self._has_any(group):
            return [(group.title, [known[flag] for flag in group.names if flag in known])]
        flag = name.lstrip("-").replace("_", "-")
        if flag in known:
            home = next((group.title for group in self._groups.values() if flag in group.names), "options")
            return [(home, [known[flag]])]
        near = _near(flag, [*self._groups, *known])
        groups = ", ".join(self._groups)
        hint = f"; did you mean {near}?" if near else ""
        self.error(f"help: {name!r} is neither a flag nor one of the groups {groups}{hint}")

    def _near(self, flag: str) -> str:
        """Returns the flag that was probably meant: one that help lists, else one that it leaves out; empty if none."""
        name = flag.split(maxsplit=1)[0].lstrip("-").replace("_", "-").lower()
        hidden = [known.removeprefix("--") for known in self.flags if known.startswith("--")]
        near = _near(name, [*help_pages.by_name(self._actions)]) or _near(name, hidden)
        return near and f"--{near}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError for a value that is not among the choices, with the choice that was probably meant."""
        choices = [str(choice) for choice in action.choices or ()]
        near = _near(str(value), choices) if action.choices is not None and value not in action.choices else ""
        if near:
            known = ", ".join(map(repr, choices))
            text = f"invalid choice: {value!r}; did you mean {near}? (choose from {known})"
            raise argparse.ArgumentError(action, text)
        super()._check_value(action, value)


def _near(name: str, known: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, 1, LIKELY)), "")
