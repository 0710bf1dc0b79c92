"""Help of a command with many flags: one line per common flag, and pages with the full text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence

from quire.flags.groups import FlagGroup
from quire.flags.setting_flags import human_int

WIDTH = 80
COLUMN = 32  # column of a flag's text
MAX_CHOICES_WIDTH = 12  # characters of choices shown in a line; longer ones are on the flag's page

Groups = Mapping[str, FlagGroup]


def by_name(actions: Iterable[argparse.Action]) -> dict[str, argparse.Action]:
    """Returns the flags shown in help, by each of their names without dashes."""
    return {
        name.lstrip("-"): action
        for action in actions
        if action.help != argparse.SUPPRESS
        for name in action.option_strings
    }


def overview(actions: Sequence[argparse.Action], groups: Groups) -> list[str]:
    """Returns the lines of common flags by group, preceded by flags without a group."""
    known = by_name(actions)
    grouped = {known[name] for group in groups.values() for name in group.names if name in known}
    own = [action for action in dict.fromkeys(known.values()) if action not in grouped]
    positional = [action for action in actions if not action.option_strings and action.help != argparse.SUPPRESS]
    lines = [_line(action, (action.help or "").replace("%%", "%")) for action in (*positional, *own)]
    for group in groups.values():
        if shown := [_line(known[name], text) for name, text in group.common.items() if name in known]:
            lines += ["", f"{group.title}:", *shown]
    return lines


def sections(actions: Sequence[argparse.Action], groups: Groups) -> list[tuple[str, list[argparse.Action]]]:
    """Returns the titles of all groups that have flags here, with the flags."""
    known = by_name(actions)
    found = [
        (f"{group.title} (--help={name})", [known[flag] for flag in group.names if flag in known])
        for name, group in groups.items()
    ]
    return [(title, members) for title, members in found if members]


def page(found: Iterable[tuple[str, Sequence[argparse.Action]]], prog: str) -> str:
    """Returns the full text of flags, with a title per group."""
    formatter = argparse.HelpFormatter(prog, max_help_position=COLUMN)
    for title, members in found:
        formatter.start_section(title)
        formatter.add_arguments(members)
        formatter.end_section()
    return formatter.format_help()


def _line(action: argparse.Action, text: str) -> str:
    return f"  {_name(action):<{COLUMN - 3}} {text}"


def _name(action: argparse.Action) -> str:
    """Returns a flag as help shows it: its long name with a placeholder for the value, or --[no-]name."""
    if not action.option_strings:
        return f"{action.metavar or action.dest}"
    name = next((name for name in action.option_strings if name.startswith("--")), action.option_strings[0])
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"--[no-]{name[2:]}"
    return name if action.nargs == 0 else f"{name} {_value(action)}"


def _value(action: argparse.Action) -> str:
    """Returns the placeholder of a flag's value: its choices if they are short, N for numbers, else its metavar or
    last word."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else ""
    if choices and len(choices) <= MAX_CHOICES_WIDTH:
        return choices
    if action.type in (human_int, float):
        return "N"
    if isinstance(action.metavar, str) and not choices:
        return action.metavar.partition(",")[0].partition("|")[0]
    return action.dest.rpartition(".")[2].rsplit("_", 1)[-1].upper()
