"""Reading of answers as a frontend does it, and rules that hold for every result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import AddedToken

from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.output_processor.answer_parser import CallDelta, Part, append_part
from quire.services.frontend.output_processor.parsing import registry
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.request.request import ChatPrompt, Request, Sampling, ToolUse
from quire.services.frontend.scheduler_client.sequence import PromptHashes, PromptRequest
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.pb.common.v1 import sampling_pb2
from tests.services.frontend.output_processor.fuzz.conversations import TOOLS, Answer
from tests.services.frontend.output_processor.fuzz.mutations import mutated
from tests.services.frontend.output_processor.fuzz.spellings import Family
from tests.services.frontend.output_processor.parsers.reading import pieces
from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder
from tests.services.frontend.tool_model import TEMPLATE

NO_PROMPT = PreparedPrompt(
    PromptRequest("r", b"", 0, PromptHashes(b"", b""), sampling_pb2.SamplingParams(), b"", b"", 0, "", 0.0, None)
)


class Failure(NamedTuple):
    """Text, and the rule that it violates."""

    rule: str
    text: str
    found: str


class FamilyReader:
    """Parsers of one family, as settings choose them."""

    def __init__(self, family: Family, tokenizer: Tokenizer) -> None:
        self._formats = AnswerFormats(family.tools, family.reasoning or "none", tokenizer)
        thoughts = registry.reasoning_format(family.reasoning) if family.reasoning else None
        begun = thoughts.starts[0] if thoughts is not None and family.is_open else ""
        prompt = ChatPrompt([{"role": "assistant", "content": begun}], continue_final_message=True)
        self._request = Request("r", "", (prompt,), Sampling(), 0.0, parse_answer=True, tool_use=ToolUse(TOOLS))
        markup = registry.tool_format(family.tools).tokens + family.markup
        self._markup = tuple(dict.fromkeys((*markup, *(thoughts.tokens if thoughts is not None else ()))))

    def read(self, parts: Sequence[str]) -> list[Part]:
        """Reads an answer and joins its parts as a client does."""
        parsers = self._formats.parsers(self._request, [NO_PROMPT])
        assert parsers is not None
        found: list[Part] = []
        for part in [part for text in parts for part in parsers[0].push(text)] + parsers[0].finish():
            append_part(found, part._replace(id="some" if part.name else "") if isinstance(part, CallDelta) else part)
        return found

    def failure(self, text: str, random: Random) -> Failure | None:
        """Returns the first rule that the text violates."""
        try:
            whole = self.read([text])
            cuts = [random.randrange(len(text) + 1) for _ in range(random.randrange(1, 8))]
            others = [self.read(list(text)), self.read(pieces(text, cuts))]
        except Exception as error:  # any exception is a finding
            return Failure("no exception", text, repr(error))
        if any(other != whole for other in others):
            return Failure("the same however it is cut", text, f"{whole}\n{others}")
        return next((Failure(rule, text, str(whole)) for part in whole if (rule := self._broken_rule(part))), None)

    def _broken_rule(self, part: Part) -> str:
        if isinstance(part, CallDelta):
            if part.name not in {tool.name for tool in TOOLS}:
                return "calls are of offered tools"
            return "" if _is_object(part.arguments) else "arguments are valid JSON"
        if isinstance(part, Content) and any(marker in part.text for marker in self._markup):
            return "no markup in content"
        return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def failures(family: Family, tokenizer: Tokenizer, answers: Sequence[Answer], seeds: range) -> list[Failure]:
    """Returns the failures of mutated answers, one answer per seed."""
    reader = FamilyReader(family, tokenizer)
    found = []
    for seed in seeds:
        random = Random(seed)
        failure = reader.failure(mutated(family.write(random.choice(answers)), random), random)
        if failure is not None:
            found.append(failure)
    return found


def expected(answer: Answer, family: Family) -> list[Part]:
    """Returns the parts of a faultless answer, without the calls' arguments and white space."""
    thoughts = [Reasoning(answer.reasoning.strip())] if family.reasoning and answer.reasoning else []
    has_text = answer.text and not (answer.calls and family.calls_alone)
    text = [Content(answer.text.strip())] if has_text else []
    return [*thoughts, *text, *(CallDelta(i, "some", call.name, "") for i, call in enumerate(answer.calls))]


def marked_tokenizer(folder: Path) -> Tokenizer:
    """Returns a tokenizer with all markup as special tokens that is special in any family's tokenizer."""
    tables = ((registry.TOOL_PARSERS, registry.tool_format), (registry.REASONING_PARSERS, registry.reasoning_format))
    tokens = {token for table, load in tables for name in table for token in load(name).tokens}
    made = byte_level_tokenizer()
    made.add_special_tokens([AddedToken(text, special=True) for text in sorted(tokens)])
    return Tokenizer(write_folder(folder, tokenizer=made, chat_template=TEMPLATE), threads=1)
