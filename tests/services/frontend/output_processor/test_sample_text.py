"""Tests of stop strings: they apply neither in reasoning nor in calls, and match at the same place for every split."""

from __future__ import annotations

from random import Random

import pytest

from quire.services.frontend.output_processor.answer_parser import AnswerParser, CallDelta, Part, append_part
from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.registry import reasoning_format, tool_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.sample_text import new_text
from quire.services.frontend.request.request import Sampling
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from tests.services.frontend.tiny_folder import write_folder

CALL = '<tool_call>{"name": "now", "arguments": {"zone": "STOP"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("models") / "tiny"), threads=1)


def parser() -> AnswerParser:
    thoughts, calls = reasoning_format("qwen3"), tool_format("hermes")
    return AnswerParser(
        MarkupReader(lambda scan, writer: thoughts.read(scan, writer, False, CallProbe())),
        MarkupReader(lambda scan, writer: calls.read(scan, writer, ToolSchemas())),
        new_id=lambda number, name: f"{name}-{number}",
        most_calls=None,
        wants_reasoning=True,
    )


def read(tokenizer: Tokenizer, groups: list[list[int]], **sampling: object) -> tuple[list[Part], str | None, int]:
    """Returns the parts, joined as a client joins them, the stop string, and the number of counted tokens."""
    text = new_text(Sampling(**sampling), tokenizer, final_only=False, parser=parser())  # type: ignore[arg-type]
    joined: list[Part] = []
    num_tokens = 0
    for group in [*groups, None]:
        piece = text.flush() if group is None else text.push(group, False)
        num_tokens += piece.num_tokens
        for part in text.take_parts() or ():
            append_part(joined, part)
        if piece.stop is not None:
            return joined, piece.stop, num_tokens
    return joined, None, num_tokens


NOW = CallDelta(0, "now-0", "now", '{"zone": "STOP"}')
CASES: tuple[tuple[str, str, list[Part], str | None], ...] = (
    # vllm#52393, lm-evaluation-harness sends "Question:"
    ("Q:", "<think>The Q: is</think>It is 4.Q: 3", [Reasoning("The Q: is"), Content("It is 4.")], "Q:"),
    # sglang#40529, vllm#14170: a line break ends the reasoning
    ("\n\n", "<think>One.\n\nTwo.</think>\n\nIt is 4.", [Reasoning("One.\n\nTwo."), Content("It is 4.")], None),
    ("\n\n", "<think>One.\n\nTwo.</think>\n\nIt\n\nis", [Reasoning("One.\n\nTwo."), Content("It")], "\n\n"),
    # a stop string in the markup of a call, in its name, in its arguments
    ('"', f"Yes.{CALL}", [Content("Yes."), NOW], None),
    ("}", CALL, [NOW], None),
    ("now", CALL, [NOW], None),
    ("</tool_call>", f"Yes.{CALL} Done.", [Content("Yes."), NOW, Content("Done.")], None),
    ("Done", f"Yes.{CALL} Done.", [Content("Yes."), NOW], "Done"),
    # no match spans a call, and a partial match is emitted before it
    ("ab", f"a{CALL}b", [Content("a"), NOW, Content("b")], None),
    # white space that belongs to markup is not content
    ("\n", f"Yes.\n{CALL}", [Content("Yes."), NOW], None),
    ("\n", "Yes.\n", [Content("Yes.")], "\n"),
    # text that only began like markup is content
    ("<tool", "a <tool b", [Content("a ")], "<tool"),
)  # fmt: skip


@pytest.mark.parametrize(("stop", "answer", "expected", "found"), CASES)
def test_stop_strings_count_in_content_only(
    tokenizer: Tokenizer, stop: str, answer: str, expected: list[Part], found: str | None
) -> None:
    ids = tokenizer.encode_inline(answer, add_special_tokens=False)
    assert read(tokenizer, [ids], stop=(stop,))[:2] == (expected, found)
    assert read(tokenizer, [[i] for i in ids], stop=(stop,))[:2] == (expected, found)
    random = Random(answer)
    for _ in range(30):
        cuts = sorted(random.choices(range(len(ids) + 1), k=4))
        groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert read(tokenizer, groups, stop=(stop,))[:2] == (expected, found)


def test_tokens_after_a_match_do_not_count(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode_inline("<think>STOP</think>Yes STOP", add_special_tokens=False)
    after = tokenizer.encode_inline(" and more", add_special_tokens=False)
    for groups in ([before + after], [[i] for i in before + after]):
        parts, stop, num_tokens = read(tokenizer, groups, stop=("STOP",))
        assert (parts, stop) == ([Reasoning("STOP"), Content("Yes ")], "STOP")
        assert num_tokens <= len(before)


def test_the_stop_string_may_stay_in_the_content(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_inline("<think>STOP</think>Yes STOP.", add_special_tokens=False)
    parts, stop, _ = read(tokenizer, [ids], stop=("STOP",), include_stop_str_in_output=True)
    assert (parts, stop) == ([Reasoning("STOP"), Content("Yes STOP")], "STOP")


def test_min_tokens_apply_to_content(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_inline("a STOP b STOP", add_special_tokens=False)
    first = len(tokenizer.encode_inline("a STOP", add_special_tokens=False))
    parts, stop, _ = read(tokenizer, [ids], stop=("STOP",), min_tokens=first)
    assert (parts, stop) == ([Content("a STOP b ")], "STOP")
