"""Command-line flags generated from settings: same names, help and validation."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, get_args, get_origin, runtime_checkable

from pydantic.fields import FieldInfo

from quire.shared.settings import SERVICES, Settings
from quire.shared.settings.base import earlier_names, is_mapping, is_secret

UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


@runtime_checkable
class Renaming(Protocol):
    """A parser that accepts earlier names of flags."""

    def deprecate(self, old: str, new: str) -> None:
        """Accepts `old` in place of the flag `new`, with a warning."""


def human_int(text: str) -> int:
    """Parses integers such as 1000, 32k = 32000, 1K = 1024, 2.5k = 2500; a fraction of a binary unit is refused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if match is None or ("." in match[1] and match[2] not in {"k", "m", "g"}):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (units: k, K, m, M, g, G)")
    value = float(match[1]) * UNITS[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def add_setting(
    parser: argparse.ArgumentParser,
    name: str,
    field: FieldInfo,
    dest: str | None = None,
    also: Sequence[str] = (),
) -> None:
    """Adds a flag for one field; if it is not given, it has no value. `also`: additional choices, translated by the
    caller."""
    options: dict[str, Any] = {
        "dest": dest or name,
        "default": argparse.SUPPRESS,
        "help": (field.description or "").replace("%", "%%"),
    }
    if isinstance(parser, Renaming):
        for old in earlier_names(field):
            parser.deprecate(f"--{old.replace('_', '-')}", f"--{name.replace('_', '-')}")
    annotation = field.annotation
    if is_secret(field):
        options |= {"action": RefusedSecret, "metavar": name.rsplit("_", 1)[-1].upper(), "help": argparse.SUPPRESS}
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
        return
    if annotation is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(annotation) is Literal:
        options["choices"] = (*get_args(annotation), *also)
        if also:
            options["metavar"] = "{" + ",".join(get_args(annotation)) + "}"
    elif get_origin(annotation) is tuple:
        options["type"] = _words
        options["metavar"] = "A,B,..."
    elif is_mapping(annotation):
        options["type"] = mapping
        options["action"] = MergeNames
        options["metavar"] = "NAME=VALUE,..."
    else:
        options["type"] = human_int if annotation is int else annotation
        options["metavar"] = name.rsplit("_", 1)[-1].upper()
    parser.add_argument(f"--{name.replace('_', '-')}", **options)


def add_settings(parser: argparse.ArgumentParser, model: type[Settings], leave_out: Iterable[str] = ()) -> None:
    for name, field in model.model_fields.items():
        if name not in leave_out:
            add_setting(parser, name, field)


class RefusedSecret(argparse.Action):
    """Refuses a value that others could read, and names the places for it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Ends the process with an error that names the environment variables to use instead."""
        name = self.dest.rpartition(".")[2]
        variables = " or ".join(f"QUIRE_{s}_{name}".upper() for s, m in SERVICES.items() if name in m.model_fields)
        parser.error(
            f"argument {option}: must not be given on the command line, which other users can read; set {variables} "
            "or put it "
            "into the settings file"
        )


class MergeNames(argparse.Action):
    """Lets a mapping's flag be repeated; each adds names, none may be given twice."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Merges the values into those of earlier occurrences of the flag; ends the process with an error if a name
        repeats."""
        known: dict[str, str] = getattr(namespace, self.dest, None) or {}
        if twice := known.keys() & values.keys():
            parser.error(f"argument {option}: {min(twice)} is given twice; give it once")
        setattr(namespace, self.dest, {**known, **values})


def mapping(text: str) -> dict[str, str]:
    """Parses NAME=VALUE,... or a JSON object. Raises ArgumentTypeError for a repeated name, and for other JSON."""
    if text.lstrip().startswith("{"):
        return _json_mapping(text)
    values: dict[str, str] = {}
    for part in _words(text):
        name, _, value = part.partition("=")
        if name in values:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        values[name] = value
    return values


def _json_mapping(text: str) -> dict[str, str]:
    """Parses a JSON object of numbers and texts, as vLLM's flags take them. Raises ArgumentTypeError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    for name, value in found.items():
        if isinstance(value, dict | list | bool) or value is None:
            raise argparse.ArgumentTypeError(f"{name}: {json.dumps(value)} is neither a number nor a text")
    return {name: str(value) for name, value in found.items()}


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
