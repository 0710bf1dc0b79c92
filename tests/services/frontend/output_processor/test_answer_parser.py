"""Tests of the conversion from tokens to parts, for every grouping of tokens by steps and slow readers."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import AddedToken

from quire.services.frontend.output_processor.answer_parser import AnswerParser, CallDelta, Part
from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.registry import reasoning_format, tool_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.sample_text import new_text
from quire.services.frontend.request.request import Sampling
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder
from tests.services.frontend.tool_model import MARKUP

ANSWER = (
    "<think>\n你好 🙂 é\n</think>\n\nSo: 🙃<tool_call>\n"
    '{"name": "get_wéather", "arguments": {"city": "Malmö 🙂", "note": "\\"\\ud83d\\ude42<tool_call>"}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call> 好'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = byte_level_tokenizer()
    made.add_special_tokens([AddedToken(text, special=True) for text in MARKUP])
    return Tokenizer(write_folder(tmp_path_factory.mktemp("models") / "marked", tokenizer=made), threads=1)


def read(tokenizer: Tokenizer, groups: list[list[int]], *, most_calls: int | None = None) -> list[Part]:
    """Reads the groups and joins the parts as a client does."""
    thoughts, calls = reasoning_format("qwen3"), tool_format("hermes")
    shown = frozenset((*thoughts.tokens, *calls.tokens))
    words = new_text(Sampling(), tokenizer, final_only=False, shown=shown)
    parser = AnswerParser(
        MarkupReader(lambda scan, writer: thoughts.read(scan, writer, False, CallProbe())),
        MarkupReader(lambda scan, writer: calls.read(scan, writer, ToolSchemas())),
        new_id=lambda number, name: f"{name}-{number}",
        most_calls=most_calls,
        wants_reasoning=True,
    )
    parts = [part for group in groups for part in parser.push(words.push(group, False).text)]
    parts += parser.push(words.flush().text) + parser.finish()
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, CallDelta) and isinstance(part, CallDelta) and last.number == part.number:
            joined[-1] = last._replace(arguments=last.arguments + part.arguments)
        elif isinstance(last, Content) and isinstance(part, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined


def test_all_groupings_of_tokens_give_equal_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_inline(ANSWER, add_special_tokens=False)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    whole = read(tokenizer, [ids])
    assert whole == [
        Reasoning("你好 🙂 é"),
        Content("So: 🙃"),
        CallDelta(0, "get_wéather-0", "get_wéather", '{"city": "Malmö 🙂", "note": "\\"\\ud83d\\ude42<tool_call>"}'),
        CallDelta(1, "now-1", "now", "{}"),
        Content("好"),
    ]
    random = Random(3)
    for _ in range(200):
        torn = [byte_ids[bytes([b])] for b in ANSWER.encode()] if random.random() < 0.3 else ids
        cuts = sorted(random.sample(range(1, len(torn)), random.randrange(1, 20)))
        groups = [torn[a:b] for a, b in zip([0, *cuts], [*cuts, len(torn)], strict=True)]
        assert read(tokenizer, groups) == whole


def test_text_after_the_last_allowed_call_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_inline(ANSWER, add_special_tokens=False)
    for groups in ([ids], [[token] for token in ids]):
        parts = read(tokenizer, groups, most_calls=1)
        assert [type(part) for part in parts] == [Reasoning, Content, CallDelta]
