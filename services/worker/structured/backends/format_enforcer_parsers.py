"""Character parsers of lm-format-enforcer, with what its parsers leave out: spaces that begin strings, no "}" after a
comma, and JSON texts that end."""

from __future__ import annotations

from typing import Any

from lmformatenforcer import CharacterLevelParser, JsonSchemaParser, UnionParser
from lmformatenforcer.jsonschemaparser import StringParsingState

FREE_TEXT = "json_freetext"  # inside of a JSON string: (this, length so far, minimum length, maximum length)


def advance_text(parser: CharacterLevelParser, text: str) -> CharacterLevelParser | None:
    """Returns the parser after the characters of `text`, None if it does not allow one of them."""
    for character in text:
        if is_complete(parser) or not allows(parser, character):
            return None
        parser = count_leading_space(parser.add_character(character), character)
    return parser


def count_leading_space(parser: CharacterLevelParser, character: str) -> CharacterLevelParser:
    """Returns the parser with a space that begins a JSON string counted, which the library does not count; any other
    `character` changes nothing."""
    if character != " " or not is_plain_text(parser):
        return parser
    *outer, text = parser.object_stack
    if text.parsed_string:
        return parser
    counted = text._clone()
    counted.parsed_string = character
    parser.object_stack = [*outer, counted]
    return parser


def allows(parser: CharacterLevelParser, character: str) -> bool:
    """Tells whether the parser allows `character`, including spaces inside of strings, which the library allows only as
    parts of whole tokens."""
    return character in next_characters(parser) or (character == " " and is_free_text(parser.shortcut_key()))


def next_characters(parser: CharacterLevelParser) -> str:
    """Returns the allowed next characters, without "}" after a comma, which the library allows although it is
    not JSON."""
    allowed: str = parser.get_allowed_characters()
    return allowed.replace("}", "") if last_character(parser) == "," else allowed


def last_character(parser: CharacterLevelParser) -> str:
    """Returns the last character of a JSON text so far, without spaces; empty if there is none."""
    if isinstance(parser, UnionParser):  # one parser per schema that matches so far, of the same text
        return last_character(parser.parsers[0])
    if not isinstance(parser, JsonSchemaParser) or is_in_string(parser):
        return ""
    return str(parser.last_non_whitespace_character)


def is_in_string(parser: JsonSchemaParser) -> bool:
    """Whether the JSON text so far ends inside of a string."""
    text = parser.object_stack[-1] if parser.object_stack else None
    return isinstance(text, StringParsingState) and text.seen_opening_quote and not text.seen_closing_quote


def is_plain_text(parser: CharacterLevelParser) -> bool:
    """Tells whether the parser is inside of a JSON string of any text."""
    return isinstance(parser, JsonSchemaParser) and is_free_text(parser.shortcut_key())


def remaining_characters(parser: CharacterLevelParser) -> int:
    """Returns the number of characters that the string may still have."""
    _, length, _, most = parser.shortcut_key()
    return int(most) - int(length)


def is_free_text(shortcut: Any) -> bool:
    """Whether the library's shortcut key says that any text may follow in a JSON string."""
    return isinstance(shortcut, tuple) and shortcut[0] == FREE_TEXT


def is_complete(parser: CharacterLevelParser) -> bool:
    """Tells whether a JSON text is complete; the library would still allow spaces after it."""
    return isinstance(parser, JsonSchemaParser) and not parser.object_stack
