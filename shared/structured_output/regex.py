"""Regular expressions as terminals of a grammar."""

from __future__ import annotations

ASCII = {"d": "0-9", "w": "0-9A-Za-z_"}


def terminal(pattern: str) -> str:
    r"""/pattern/ that matches as a whole. As in JavaScript and JSON Schema, \d and \w mean ASCII."""
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith(r"\$"):
        inner = inner[:-1]
    return f"/{_ascii(inner)}/"


def _ascii(pattern: str) -> str:
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
    positive = ASCII.get(character)
    if positive is not None:
        return positive if in_class else f"[{positive}]"
    negative = ASCII.get(character.lower())
    if negative is not None and not in_class:
        return f"[^{negative}]"
    return f"\\{character}"
