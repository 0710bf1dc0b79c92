"""Regular expressions as terminals of a grammar."""

from __future__ import annotations

from quire.shared.structured_output.look_around import LOOKS, has_alternatives, plain_patterns

SPECIAL = frozenset(r"\.+*?()|[]{}^$")
ASCII = {"d": "0-9", "w": "0-9A-Za-z_"}


def terminal(pattern: str) -> str:
    """Returns the body of a terminal that matches as a whole: `/pattern/`, or the intersection of several."""
    if not LOOKS.search(pattern):
        return f"/{whole(pattern)}/"
    anchored = f"^(?:{whole(pattern)})$" if has_alternatives(pattern) else f"^{whole(pattern)}$"
    return " & ".join(f"/{whole(each)}/" for each in plain_patterns(anchored))


def whole(pattern: str) -> str:
    r"""Returns the pattern without its anchors. As in JavaScript and JSON Schema, \d and \w match ASCII only."""
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith(r"\$"):
        inner = inner[:-1]
    return _ascii(inner)


def escape(text: str) -> str:
    """Returns a pattern that matches only this text."""
    return "".join(f"\\{character}" if character in SPECIAL else character for character in text)


def _ascii(pattern: str) -> str:
    r"""Returns the pattern with ASCII-only classes for \d and \w (outside of classes also \D and \W), and with
    slashes and line feeds escaped for Lark."""
    written: list[str] = []
    in_class = escaped = False
    for character in pattern:
        if escaped:
            written.append(_escape(character, in_class=in_class))
            escaped = False
            continue
        match character:
            case "\\":
                escaped = True
                continue
            case "[":
                in_class = True
            case "]":
                in_class = False
        written.append({"/": r"\/", "\n": r"\n"}.get(character, character))
    return "".join(written) + ("\\" if escaped else "")


def _escape(character: str, *, in_class: bool) -> str:
    """Returns the replacement of an escape sequence, given the character after the backslash; most stay as they are."""
    positive = ASCII.get(character)
    if positive is not None:
        return positive if in_class else f"[{positive}]"
    negative = ASCII.get(character.lower())
    if negative is not None and not in_class:
        return f"[^{negative}]"
    return f"\\{character}"
