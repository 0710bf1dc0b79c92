"""Converts every kind of constraint to one grammar in llguidance's dialect of Lark."""

from __future__ import annotations

from collections.abc import Iterable

from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import ebnf, regex, structural_tag
from quire.shared.structured_output.checks import MAX_NESTING, MAX_NESTING_OF_TAGS, parse
from quire.shared.structured_output.json_rule import json_rule
from quire.shared.structured_output.literals import NO_SPECIAL_TOKENS, SpecialTokens, literal, quoted

OBJECT = {"type": "object"}


def lark(constraint: pb.StructuredOutput, specials: SpecialTokens = NO_SPECIAL_TOKENS) -> str:
    """Returns the grammar of a validated constraint; `specials`: special tokens of the vocabulary.

    Raises InvalidArgument for a grammar or a tag that cannot be parsed.
    """
    match constraint.WhichOneof("constraint"):
        case "json_schema":
            body = json_rule(parse(constraint.json_schema, "json_schema", MAX_NESTING), constraint)
        case "json_object":
            body = json_rule(OBJECT, constraint)
        case "regex":
            return f"start: PATTERN\nPATTERN: {regex.terminal(constraint.regex)}\n"
        case "choice":
            return _choice(constraint.choice.options, specials)
        case "grammar":
            return ebnf.lark(constraint.grammar) if ebnf.is_ebnf(constraint.grammar) else constraint.grammar
        case "structural_tag":
            tags = parse(constraint.structural_tag, "structural_tag", MAX_NESTING_OF_TAGS)
            return structural_tag.lark(tags, constraint, specials)
        case kind:
            raise AssertionError(f"{kind} is not checked")
    return f"start: {body}\n"


def _choice(options: Iterable[str], specials: SpecialTokens) -> str:
    """Returns the grammar of a choice. All options without special tokens are one terminal: 2,000 alternatives of a
    rule would exceed what the library tracks at a time."""
    plain: list[str] = []
    named: list[str] = []
    for option in options:
        names_one = any(name in option for name in specials.ids)
        (named if names_one else plain).append(option)
    starts = [literal(option, specials) for option in named] + (["OPTION"] if plain else [])
    terminal = f"OPTION: {' | '.join(map(quoted, plain))}\n" if plain else ""
    return f"start: {' | '.join(starts)}\n{terminal}"
