"""How this model writes reasoning and tool calls, and parsers for the answers of a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from services.frontend.input_processor.processor import Prepared
from services.frontend.output_processor.answer_parser import AnswerParser
from services.frontend.output_processor.parsing import detection, registry
from services.frontend.output_processor.parsing.formats import ReasoningFormat, ToolFormat, call_id
from services.frontend.output_processor.parsing.reader import Reader
from services.frontend.output_processor.parsing.scanner import Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.writer import Writer
from services.frontend.request import ChatPrompt, Prompt, Request
from services.frontend.tokenizer.tokenizer import Tokenizer
from shared.errors import InvalidArgument, Unimplemented
from shared.logs import logger

log = logger("answer_formats")

AUTO = "auto"
PROMPT_END = 32  # tokens in which a marker at the end of a prompt fits


class AnswerFormats:
    """Settled when the frontend starts: by name, or by what the chat template writes."""

    def __init__(
        self, tool_call_parser: str, reasoning_parser: str, tokenizer: Tokenizer, *, auto_tool_choice: bool = True
    ) -> None:
        template = tokenizer.template.source
        calls = detection.detect(detection.TOOLS, template) if tool_call_parser == AUTO else tool_call_parser
        thoughts = detection.detect(detection.REASONING, template) if reasoning_parser == AUTO else reasoning_parser
        self._tools = None if calls == detection.NONE else registry.tool_format(calls)
        self._reasoning = None if thoughts == detection.NONE else registry.reasoning_format(thoughts)
        self._may_choose = auto_tool_choice
        self._tokenizer = tokenizer
        log.info("parsers", tool_calls=calls, reasoning=thoughts)

    def check(self, request: Request) -> None:
        """Refuses tools that the model would not see or whose calls nobody would find."""
        if request.tool_use is None:
            return
        if request.tool_use.choice != AUTO:
            raise Unimplemented("tool_choice: only none and auto are offered by this server yet", field="tool_choice")
        if not self._may_choose:
            raise InvalidArgument(
                'tool_choice: "auto" is switched off (--no-enable-auto-tool-choice)', field="tool_choice"
            )
        if self._tools is None:
            raise InvalidArgument(
                "tools: it is not known how this model writes calls; start the server with --tool-call-parser",
                field="tools",
            )
        if not self._tokenizer.template.shows_tools:
            raise InvalidArgument("tools: this model's chat template does not show tools to the model", field="tools")
        if not request.sampling.detokenize:
            raise InvalidArgument("tools: calls are found in the text, which needs detokenize=True", field="tools")

    def _of(self, request: Request) -> tuple[ReasoningFormat | None, ToolFormat | None]:
        if not request.take_apart:
            return None, None
        return self._reasoning, self._tools if request.tool_use is not None else None

    def markup(self, request: Request) -> frozenset[str]:
        """Special tokens that the parsers have to see, for all that skip_special_tokens says."""
        return frozenset(token for part in self._of(request) if part is not None for token in part.tokens)

    def parsers(self, request: Request, prepared: Sequence[Prepared]) -> list[AnswerParser] | None:
        """One for each sample; None if there is nothing to find."""
        reasoning, tools = self._of(request)
        if reasoning is None and tools is None:
            return None
        return [
            self._parser(request, reasoning, tools, self._is_open(prompt, ready.token_ids))
            for prompt, ready in zip(request.prompts, prepared, strict=True)
            for _ in range(request.sampling.n)
        ]

    @staticmethod
    def _parser(
        request: Request, reasoning: ReasoningFormat | None, tools: ToolFormat | None, is_open: bool
    ) -> AnswerParser:
        use = request.tool_use
        return AnswerParser(
            None if reasoning is None else Reader(partial(_read_reasoning, reasoning, is_open)),
            None if tools is None or use is None else Reader(partial(_read_calls, tools, ToolSchemas(use.tools))),
            new_id=call_id if tools is None else tools.new_id,
            most_calls=None if use is None or use.parallel else 1,
            wants_reasoning=request.include_reasoning,
        )

    def _is_open(self, prompt: Prompt, token_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside of reasoning: many templates write its start themselves."""
        if self._reasoning is None or not self._reasoning.starts:
            return False
        if isinstance(prompt, ChatPrompt) and prompt.continue_last:
            begun = str(prompt.messages[-1].get("content") or "").lstrip()
            ended = any(end in begun for end in self._reasoning.ends)
            return begun.startswith(self._reasoning.starts) and not ended
        end = self._tokenizer.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)
        return end.rstrip().endswith(self._reasoning.starts)


def _read_reasoning(found: ReasoningFormat, is_open: bool, scan: Scanner, writer: Writer) -> Steps[None]:
    return found.read(scan, writer, is_open)


def _read_calls(found: ToolFormat, schemas: ToolSchemas, scan: Scanner, writer: Writer) -> Steps[None]:
    return found.read(scan, writer, schemas)
