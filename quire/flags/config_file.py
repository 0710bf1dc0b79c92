"""`--config FILE`: flags of a command in a YAML file, such as `dtype: bfloat16` for `--dtype bfloat16`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quire.flags.setting_flags import MergeNames, RefusedSecret
from quire.shared.errors import InvalidArgument
from quire.shared.settings import SERVICES

if TYPE_CHECKING:
    from quire.flags.parser import CommandParser

NOT_IN_FILES = ("--config", "--help", "--help-all")


@dataclass(frozen=True, slots=True)
class FileFlag:
    """A key of the file with its value and line number, from 1."""

    key: str
    value: Any
    line: int

    @property
    def flag(self) -> str:
        return f"--{self.key.replace('_', '-')}"


def parsed(parser: CommandParser, path: str, words: Sequence[str], alone: argparse.Namespace) -> argparse.Namespace:
    """Returns the values of the file's flags that the command line `words` (`alone`: as parsed without a file) does
    not set. Exits with the file's name and line for an unknown flag or an invalid value."""
    given = {parser.flags[name] for word in words if (name := word.partition("=")[0]) in parser.flags}
    positional = {action.dest for action in parser._actions if not action.option_strings}
    namespace = argparse.Namespace()
    for entry in entries(path):
        with parser.at(f"{path}, line {entry.line}"):
            action = _action(parser, entry)
            is_given = action in given or (entry.key in positional and bool(getattr(alone, entry.key)))
            _apply(parser, action, entry, argparse.Namespace() if is_given else namespace)
    return namespace


def entries(path: str) -> list[FileFlag]:
    """Reads a file. Raises InvalidArgument with its name and, if known, the line."""
    try:
        loader = yaml.SafeLoader(Path(path).read_text())
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise InvalidArgument(f"config: {path} must be a mapping of flag names to values", field="config")
        found = [
            FileFlag(str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1)
            for key, value in node.value
        ]
    except OSError as error:
        raise InvalidArgument(f"config: cannot read {path!r}: {error.strerror}", field="config") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"config: {path} is not UTF-8 (byte {error.start})", field="config") from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"config: {path} is not YAML: {_problem(error)}", field="config") from None
    _refuse_repeated(path, found)
    return found


def _problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark is not None else " ".join(str(error).split())


def _refuse_repeated(path: str, found: Sequence[FileFlag]) -> None:
    """Raises InvalidArgument with both line numbers if a flag occurs twice in the file, under any of its names."""
    first: dict[str, FileFlag] = {}
    for entry in found:
        if (earlier := first.setdefault(entry.flag, entry)) is not entry:
            text = (
                f"config: {path}, line {entry.line}: {entry.key} is also given in line {earlier.line}; remove one "
                "of them"
            )
            raise InvalidArgument(text, field="config")


def _action(parser: CommandParser, entry: FileFlag) -> argparse.Action:
    """Returns the parser's action for an entry; ends the process with an error for an unknown flag, and one that
    files may not contain."""
    if entry.flag in NOT_IN_FILES:
        parser.error(f"{entry.key} can only be given on the command line")
    if entry.key in SERVICES and entry.flag not in parser.flags and isinstance(entry.value, dict):
        parser.error(
            f"{entry.key} is a section of a settings file, not a flag; set QUIRE_CONFIG to the path of such a file"
        )
    if entry.flag not in parser.flags:
        parser.refuse_flag(entry.flag, entry.key)
    return parser.flags[entry.flag]


def _apply(parser: CommandParser, action: argparse.Action, entry: FileFlag, namespace: argparse.Namespace) -> None:
    """Parses one entry into the namespace as the command line would; secrets, which a command line refuses, are set
    directly."""
    if entry.value is None:
        parser.error(f"{entry.key} has no value; give one, or leave the key out for the default")
    if isinstance(action, RefusedSecret):
        setattr(namespace, action.dest, str(entry.value))
        return
    parser.parse_flag(_words(parser, action, entry), namespace)


def _words(parser: CommandParser, action: argparse.Action, entry: FileFlag) -> list[str]:
    """Returns the flag in command-line form; lists and objects become comma-separated values, pairs or JSON, as the
    flag parses them."""
    value = entry.value
    if isinstance(value, bool):
        return _switch(parser, action, entry)
    if isinstance(value, dict) and isinstance(action, MergeNames):
        value = ",".join(f"{name}={item}" for name, item in value.items())
    elif isinstance(value, list) and action.nargs in ("+", "*"):
        return [entry.flag, *map(str, value)]
    elif isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        value = ",".join(map(str, value))
    elif isinstance(value, dict | list):
        value = json.dumps(value)
    return [f"{entry.flag}={value}"]


def _switch(parser: CommandParser, action: argparse.Action, entry: FileFlag) -> list[str]:
    """Returns the words for a boolean value: the flag, its opposite, or none. Ends the process with an error if the
    flag needs another value."""
    if isinstance(action, argparse.BooleanOptionalAction):
        opposite = f"--{entry.flag[5:]}" if entry.flag.startswith("--no-") else f"--no-{entry.flag[2:]}"
        return [entry.flag if entry.value else opposite]
    if action.nargs in (0, "*"):
        return [entry.flag] if entry.value else []
    parser.error(
        f"argument {entry.flag}: {str(entry.value).lower()} is not a valid value; put words such as 'off' in quotes"
    )
