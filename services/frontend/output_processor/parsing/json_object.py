"""A JSON object that comes in pieces, in a text that may break off or be wrong: what is handed out can be closed at any
time, so that it always adds up to a valid object."""

from __future__ import annotations

import json
import re

from services.frontend.output_processor.parsing.json_text import CLOSING, CONTROL, ESCAPED, LONGEST_SCALAR, quoted

PLAIN = re.compile(r'[^"\\]+')  # inside a string
SPACE = re.compile(r"[ \t\r\n]+")
SCALAR = re.compile(r"[0-9A-Za-z+.\-]+")
HEX = re.compile(r"[0-9A-Fa-f]{0,4}")
PYTHONS_OWN = {"True": "true", "False": "false", "None": "null"}
KEY, COLON, VALUE, ITEM, NEXT = "key", "colon", "value", "item", "next"  # what may come next
UNICODE_DIGITS = 4


class JsonObjectText:
    """push() text, finish() once. Whatever could turn out to be no JSON is held back: a member goes out when its value
    begins, a number or a word when it is whole, strings as they come."""

    def __init__(self) -> None:
        self._text = ""  # not yet read
        self._held = ""  # read, but not yet part of a whole member
        self._out: list[str] = []
        self._open: list[str] = []  # the brackets that close what is open
        self._expects = VALUE
        self._in_string = False
        self._is_key = False
        self.is_over = False
        self.is_whole = False  # it ended with its own bracket
        self.has_begun = False  # something has been handed out

    @property
    def rest(self) -> str:
        """Text behind the object, or from where on it is no JSON."""
        return self._text

    def push(self, text: str) -> str:
        self._text += text
        while self._text and not self.is_over and self._step():
            pass
        return self._take()

    def finish(self) -> str:
        """What closes the object; nothing if none has begun."""
        self.is_over = True
        if not self.has_begun:
            return ""
        closing = ('"' if self._in_string and not self._is_key else "") + "".join(reversed(self._open))
        self._open = []
        return closing

    def _take(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _step(self) -> bool:
        """Reads one element; False if it has not come whole."""
        return self._string() if self._in_string else self._structure()

    def _read(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        return text

    def _emit(self, text: str) -> None:
        """Text that leaves the object closable, with everything that was held back for it."""
        self._out.append(self._held + text)
        self._held = ""
        self.has_begun = True

    def _string(self) -> bool:
        if self._text[0] == '"':
            self._in_string = False
            self._part_of_string(self._read(1))
            self._expects = COLON if self._is_key else NEXT
        elif self._text[0] == "\\":
            return self._escape()
        elif plain := PLAIN.match(self._text):
            self._read(plain.end())
            self._part_of_string(CONTROL.sub(lambda found: quoted(found[0]), plain[0]))
        return True

    def _part_of_string(self, text: str) -> None:
        if self._is_key:
            self._held += text
        else:
            self._emit(text)

    def _escape(self) -> bool:
        """A backslash that escapes nothing, as in C:\\dir, stands for itself."""
        if len(self._text) == 1:
            return False
        kind, size = self._text[1], 2
        if kind == "u":
            digits = HEX.match(self._text, 2)
            size += len(digits[0]) if digits else 0
            if size < len(self._text) or size == 2 + UNICODE_DIGITS:
                kind = kind if size == 2 + UNICODE_DIGITS else ""
            else:
                return False
        if kind and kind in ESCAPED:
            self._part_of_string(self._read(size))
        else:
            self._read(1)
            self._part_of_string("\\\\")
        return True

    def _structure(self) -> bool:
        first = self._text[0]
        if space := SPACE.match(self._text):
            self._held += self._read(space.end())
        elif first in CLOSING and self._expects in (VALUE, ITEM):
            self._opens(first)
        elif self._open and first == self._open[-1] and self._expects in (KEY, ITEM, NEXT):
            self._closes(first)
        elif first == "," and self._expects == NEXT:
            self._held += self._read(1)
            self._expects = KEY if self._open[-1] == "}" else ITEM
        elif first == ":" and self._expects == COLON:
            self._held += self._read(1)
            self._expects = VALUE
        elif first == '"' and self._open and self._expects in (KEY, VALUE, ITEM):
            self._in_string, self._is_key = True, self._expects == KEY
            self._part_of_string(self._read(1))
        elif self._open and self._expects in (VALUE, ITEM) and (scalar := SCALAR.match(self._text)):
            return self._scalar(scalar[0])
        else:
            self.is_over = True
        return True

    def _opens(self, bracket: str) -> None:
        if not self._open and bracket != "{":
            self.is_over = True
            return
        self._read(1)
        if self._open:
            self._emit(bracket)
        else:
            self._held = bracket  # until something follows
        self._open.append(CLOSING[bracket])
        self._expects = KEY if bracket == "{" else ITEM

    def _closes(self, bracket: str) -> None:
        """A comma behind the last member, which JSON forbids and models write, is left out."""
        self._read(1)
        self._held = self._held.replace(",", "") if self._expects != NEXT else self._held
        self._emit(bracket)
        self._open.pop()
        self._expects = NEXT
        self.is_over = self.is_whole = not self._open

    def _scalar(self, text: str) -> bool:
        if len(text) == len(self._text) and len(text) <= LONGEST_SCALAR:
            return False
        try:
            json.loads(PYTHONS_OWN.get(text, text), parse_constant=_refuse)
        except ValueError:
            self.is_over = True
            return True
        self._read(len(text))
        self._emit(PYTHONS_OWN.get(text, text))
        self._expects = NEXT
        return True


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
