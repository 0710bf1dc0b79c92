"""Constraints refused by their text alone, and the grammars of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.services.frontend.input_processor.grammars.grammar_process import ByteTokenizer
from quire.shared import structured_output
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output.literals import SpecialTokens

BYTES = LLTokenizer(TokenizerWrapper(ByteTokenizer({}, 0)))


def accepts(text: str, **constraint: Any) -> bool:
    """Whether the constraint accepts the whole text."""
    message = pb.StructuredOutput(**constraint)
    structured_output.check(message)
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(structured_output.lark(message)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refusal(**constraint: Any) -> str:
    with pytest.raises(InvalidArgument) as refused:
        accepts("", **constraint)
    assert refused.value.field == "structured_output"
    return refused.value.message.removeprefix("structured_output: ")


def choice(*options: str) -> pb.StructuredOutput.Choice:
    return pb.StructuredOutput.Choice(options=options)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        ({}, "exactly one of json_schema, json_object, regex, choice, grammar, structural_tag must be set"),
        ({"json_schema": ""}, "json_schema cannot be empty"),
        ({"json_schema": "{"}, "json_schema is not valid JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema is not valid JSON: NaN is not JSON"),
        ({"json_schema": "3"}, "json_schema must be an object or a boolean, got int"),
        ({"json_schema": "[" * 65 + "]" * 65}, "json_schema is nested 65 levels deep; at most 64 are accepted"),
        ({"json_schema": "[" * 100_000}, "json_schema is nested 100000 levels deep; at most 64 are accepted"),
        ({"json_schema": '{"enum": ["' + "a" * 600_000 + '"]}'},
            "json_schema has 600018 bytes; at most 131072 are accepted"),
        ({"json_schema": '{"multipleOf": 1299709}'},
            "multipleOf: the least common multiple of all is 1299709; at most 10000 is supported"),
        ({"json_schema": '{"allOf": [{"multipleOf": 1009}, {"multipleOf": 0.0997}]}'},
            "multipleOf: the least common multiple of all is 1005973; at most 10000 is supported"),
        ({"json_object": False}, "json_object must be true, or left out"),
        ({"regex": " "}, "regex cannot be empty"),
        ({"regex": "a\0"}, "regex contains a NUL character"),
        ({"choice": pb.StructuredOutput.Choice()}, "choice must have at least one option"),
        ({"choice": choice("a", "")}, "choice cannot contain an empty string"),
        ({"grammar": "\n"}, "grammar cannot be empty"),
        ({"grammar": "root ::= x"}, "grammar: x is not defined"),
        ({"grammar": 'a ::= "x"'}, "grammar: a rule named root is required"),
        ({"grammar": 'root ::= "x"\nroot ::= "y"'}, "grammar, line 2: root is defined twice"),
        ({"grammar": 'root ::= "x'}, "grammar, line 1: is invalid from '\"x' on"),
        ({"grammar": 'root ::= "x"\n\n  | ( "y"'}, "grammar, line 3: ) is due, not the end"),
        ({"grammar": 'root ::= "x" )'}, "grammar, line 1: ) is not expected at this place"),
        ({"grammar": "root ::= [z-a]"}, "grammar, line 1: [z-a] contains a range whose end precedes its start"),
        ({"grammar": "root ::= [\\q]"}, "grammar, line 1: \\q is not a valid escape sequence"),
        ({"grammar": 'root ::= "\\x4"'}, "grammar, line 1: \\x4 is not a valid escape sequence"),
        ({"grammar": 'root ::= "x"{3,2}'}, "grammar, line 1: {3,2} is not a valid repetition of at most 10000"),
        ({"grammar": "root ::= " + "(" * 100 + '"x"' + ")" * 100},
            "grammar, line 1: groups are nested more than 64 levels deep"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "whitespace_pattern and disable_any_whitespace cannot be combined; send one of them"),
    ],
)  # fmt: skip
def test_refused_by_its_text(constraint: dict[str, Any], text: str) -> None:
    assert refusal(**constraint) == text


def test_one_of_is_any_of() -> None:
    schema = json.dumps({"oneOf": [{"type": "integer"}, {"type": "number"}, {"const": "x"}]})
    assert accepts("1", json_schema=schema)
    assert accepts('"x"', json_schema=schema)
    assert not accepts('"y"', json_schema=schema)


def test_multiples_that_people_write_are_fine() -> None:
    money = {"type": "object", "properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 5}, "c": {"const": {}}}}
    structured_output.check(pb.StructuredOutput(json_schema=json.dumps(money)))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\d{3}-[\w/]+$", ["123-a/b_"], ["12-a", "123-é", "٣٣٣-a"]),
        (r"a/b|c\$", ["a/b", "c$"], ["a", "c"]),
        (r"[^\d]x", ["yx"], ["1x"]),
        (r"\Dx\W", ["yx "], ["1x ", "yxy"]),
        ("(a|b)\n", ["a\n"], ["a"]),
        (r"[\]/]+", ["]/"], ["\\"]),
        (r"\p{Lu}é", ["Äé"], ["äé"]),
        ("^$", [""], ["a"]),
    ],
)
def test_regular_expressions_match_as_a_whole(pattern: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert accepts(text, regex=pattern), text
    for text in wrong:
        assert not accepts(text, regex=pattern), text


def test_a_choice_is_one_of_its_options() -> None:
    options = choice('say "hi"', "\\n", "a/b", "a", "ü\n")
    for option in options.options:
        assert accepts(option, choice=options)
    for text in ("", "say", "aa", "\n"):
        assert not accepts(text, choice=options)


JSON_GRAMMAR = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON_GRAMMAR, ["{}", '{"a": [1,2,{"b":null}], "c\\n\\u00e9": -1.5e3}', '{"é": {}}'], ["[]", '{"a" 1}', '{"a']),
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab", "abcc"]),  # where the longest match is the wrong one
        ('root ::= "(" root ")" | "x" |', ["((x))", "(())", ""], ["((x)", "xx"]),
        ("root ::= a-b 'it''s' # why not\na-b ::= [^a-c\\]]+ . \"\\t\\U0001F600\"", ["xyz\t😀its"], ["az\t😀its"]),
        ("root ::= a a\na ::= b b\nb ::= c c\nc ::= [x]{1,2}", ["x" * 8, "x" * 16], ["x" * 7, "x" * 17]),
        ('root ::= ("x" y)*\ny ::= "(" root ")"', ["", "x(x())"], ["x"]),
    ],
)
def test_ebnf(grammar: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert accepts(text, grammar=grammar), text
    for text in wrong:
        assert not accepts(text, grammar=grammar), text


def test_lark_is_taken_as_it_is() -> None:
    assert accepts('n={"a": 1}', grammar='start: NAME "=" %json {"type": "object"}\nNAME: /[a-z]+/')


PRETTY = """{
  "a": {
\t\t"b": [
      1,
      2
    ]
  }
}"""


def test_whitespace_in_json() -> None:
    assert accepts(PRETTY, json_object=True)
    assert accepts('{ "a": 1, "b" : [ ] }', json_object=True)
    assert not accepts('{  "a": 1}', json_object=True)  # by which a model could fill its answer
    assert accepts('{   "a":1}', json_object=True, whitespace_pattern=" +")
    assert accepts('{"a":[1,2]}', json_object=True, disable_any_whitespace=True)
    assert not accepts('{"a": 1}', json_object=True, disable_any_whitespace=True)


def test_additional_properties_can_be_switched_off_everywhere() -> None:
    inner = {"properties": {"b": {"type": "integer"}}, "type": "object"}
    schema = json.dumps({
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/inner"}, "open": {"type": "object", "additionalProperties": True}},
        "$defs": {"inner": inner},
    })  # fmt: skip
    extra = ['{"x": 1}', '{"a": {"x": 1}}']
    assert all(accepts(text, json_schema=schema) for text in extra)
    assert not any(accepts(text, json_schema=schema, disable_additional_properties=True) for text in extra)
    fine = '{"a": {"b": 1}, "open": {"x": 2}}'
    assert accepts(fine, json_schema=schema, disable_additional_properties=True)


def tags(**fields: Any) -> str:
    return json.dumps(fields)


def call(name: str) -> dict[str, Any]:
    return {"begin": f"<f={name}>", "schema": {"type": "integer"}, "end": "</f>"}


CALLS = tags(structures=[call("a"), call("b"), {**call("c"), "begin": "[c]"}], triggers=["<f=", "[c]"])


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return form("tag", begin=begin, content=content, end=end)


NUMBER = form("json_schema", json_schema={"type": "integer"})
ANY = form("any_text")
TAG_A, TAG_B = tag("<a>", NUMBER, "</a>"), tag("<b>", ANY, ["</b>", "</B>"])
TRIGGERED = form("triggered_tags", triggers=["<a", "<b"], tags=[TAG_A, TAG_B])
THOUGHT = [form("const_string", value="<think>"), ANY, form("const_string", value="</think>")]


@pytest.mark.parametrize(
    ("tag", "right", "wrong"),
    [
        (CALLS, ["", "text", "x <f=a>1</f> y [c]2</f>", "<f=b>2</f><f=a>1</f>!"],
            ["<f=", "<f=a>1</f> <f=b>x", "x <f=d>1</f>", "<f=a>x</f>", "<f=a>1", "[c]x"]),
        (tags(format=TRIGGERED), ["", "x<a>1</a>y<b>z</B>", "<", "a>"], ["<a>", "<a>1", "<b>x</c>"]),
        (tags(format={**TRIGGERED, "at_least_one": True}), ["x<a>1</a>y", "<b></b><a>2</a>"], ["", "x"]),
        (tags(format={**TRIGGERED, "stop_after_first": True}), ["", "xy", "x<a>1</a>"], ["<a>1</a>x", "<ab"]),
        (tags(format={**TRIGGERED, "stop_after_first": True, "at_least_one": True}), ["x<a>1</a>"],
            ["", "x", "<a>1</a> "]),
        (tags(format={**TRIGGERED, "excludes": ["no"]}), ["n<a>1</a>o"], ["no", "no<a>1</a>"]),
        (tags(format=form("tags_with_separator", tags=[TAG_A, TAG_B], separator=",")),
            ["", "<a>1</a>", "<b>x,</b>,<a>1</a>"], [",", "<a>1</a>,", "<a>1</a><a>1</a>"]),
        (tags(format=form("tags_with_separator", tags=[TAG_A], separator="", at_least_one=True)),
            ["<a>1</a><a>1</a>"], ["", "x"]),
        (tags(format=form("sequence", elements=[*THOUGHT, form("or", elements=[NUMBER, TAG_B])])),
            ["<think>a\nb</think>7", "<think></think><b></b>"],
            ["<think>a", "7", "<think></think>", "<think></think></think>7"]),
        (tags(format=form("optional", content=NUMBER)), ["", "1"], ["1 2", "x"]),
        (tags(format=form("plus", content=TAG_A)), ["<a>1</a><a>1</a>"], [""]),
        (tags(format=form("star", content=TAG_A)), ["<a>1</a><a>1</a>", ""], ["x"]),
        (tags(format=form("repeat", content=TAG_A, min=1, max=2)), ["<a>1</a><a>1</a>"], ["", "<a>1</a>" * 3]),
        (tags(format=form("regex", pattern=r"\d+")), ["12"], ["", "x"]),
        (tags(format=form("any_text", excludes=["<a", "b"])), ["", "x<"], ["x<a", "b"]),
        (tags(format=tag("(", form("grammar", grammar='root ::= "x" root | "y"'), ")")), ["(xxy)"], ["(xx)", "xy"]),
        (tags(format=form("grammar", grammar='start: "x" %json {"type": "null"}')), ["xnull"], ["x"]),
    ],
)  # fmt: skip
def test_structural_tags(tag: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert accepts(text, structural_tag=tag), text
    for text in wrong:
        assert not accepts(text, structural_tag=tag), text


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ({}, "format must be given, or structures and triggers"),
        ({"structures": [3], "triggers": []}, "structures[0] must be an object, got 3"),
        ({"structures": [call("a")], "triggers": []},
            "format.triggers must hold at least one text, none of them empty"),
        ({"structures": [call("a")], "triggers": ["<g"]},
            "format.tags[0].begin '<f=a>' starts with none of the triggers"),
        ({"format": form("token", token=3)},
            "format.type 'token' is not supported; available: const_string, json_schema, regex, grammar, any_text, "
            "sequence, or, tag, triggered_tags, tags_with_separator, optional, star, plus, repeat"),
        ({"format": form("sequence", elements=[NUMBER, form("regex")])},
            "format.elements[1].pattern must be a text that is not empty, got None"),
        ({"format": form("json_schema", style="qwen_xml", json_schema={})},
            "format.style 'qwen_xml' is not supported; available: 'json'"),
        ({"format": form("any_text", max_tokens=3)}, "format.max_tokens is not supported"),
        ({"format": form("repeat", content=NUMBER, min=3, max=1)}, "format min must be at most max=1, got 3"),
    ],
)  # fmt: skip
def test_tags_that_cannot_be_read(tag: dict[str, Any], text: str) -> None:
    assert refusal(structural_tag=json.dumps(tag)) == f"structural_tag: {text}"


def test_texts_that_name_special_tokens_mean_these() -> None:
    specials = SpecialTokens({"<|call|>": 7, "<|end|>": 9, "<think>": 3, "</think>": 4}, frozenset({3, 4}))
    message = pb.StructuredOutput(choice=choice("<|call|>x<|end|>", "<|call"))
    assert structured_output.lark(message, specials) == 'start: <[7]> "x" <[9]> | OPTION\nOPTION: "<|call"\n'
    triggered = form("triggered_tags", triggers=["<|call|>"], tags=[tag("<|call|>f", NUMBER, "<|end|>")])
    written = structured_output.lark(pb.StructuredOutput(structural_tag=tags(format=triggered)), specials)
    assert '(S0 (<[3]> | <[4]>))* TEXT <[7]> ("f" %json' in written
    assert "<[9]>" in written
