"""Formats in which the model writes reasoning and tool calls: constraints that enforce them, and parsers that read
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.output_processor import constraint
from quire.services.frontend.output_processor.answer_parser import AnswerParser
from quire.services.frontend.output_processor.constraint import AnswerStart
from quire.services.frontend.output_processor.parsing import call_grammar, detection, registry
from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat, ToolFormat, call_id
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import no_padding
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter
from quire.services.frontend.request.request import ChatPrompt, Prompt, Request, ToolUse
from quire.services.frontend.request.tool_offer import AUTO
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.structured_output.checks import FIELD

log = logger("answer_formats")

DETECT = "auto"
PLAIN_JSON = "xlam"  # for required calls where the model's native format cannot be enforced
PROMPT_END = 32  # tokens; a marker at the end of a prompt fits into them
END_CHARACTERS = 256  # characters; a marker at the end of a prompt fits into them


class AnswerFormats:
    """Parsers and constraints of one model, selected at start by name or by what the chat template writes."""

    def __init__(
        self, tool_call_parser: str, reasoning_parser: str, tokenizer: Tokenizer, *, auto_tool_choice: bool = True
    ) -> None:
        template = tokenizer.template.source
        calls = detection.detect(detection.TOOLS, template) if tool_call_parser == DETECT else tool_call_parser
        thoughts = detection.detect(detection.REASONING, template) if reasoning_parser == DETECT else reasoning_parser
        self._tools = None if calls == detection.NONE else registry.tool_format(calls)
        self._reasoning = (
            None
            if thoughts == detection.NONE
            else _with_known_spellings(registry.reasoning_format(thoughts), tokenizer)
        )
        self._may_choose = auto_tool_choice
        ends = self._reasoning.ends if self._reasoning is not None else ()
        # None also where the end is not a single token
        self.end_of_reasoning = tokenizer.token_id(ends[0]) if ends else None
        self._tokenizer = tokenizer
        log.info("parsers", tool_calls=calls, reasoning=thoughts)

    def check(self, request: Request) -> None:
        """Refuses tools that the model would not see or whose calls could not be parsed."""
        use = request.tool_use
        if use is None:
            return
        if use.choice == AUTO and not self._may_choose:
            raise InvalidArgument(
                "tool_choice: auto is disabled on this server (--no-enable-auto-tool-choice); send required or a "
                "function",
                field="tool_choice",
            )
        if use.choice == AUTO and self._tools is None:
            raise InvalidArgument(
                "tools: the tool-call format of this model is unknown; start the server with --tool-call-parser, one "
                "of " + ", ".join(sorted(registry.TOOL_PARSERS)),
                field="tools",
            )
        if use.choice != AUTO and request.sampling.structured_output is not None:
            raise InvalidArgument(
                "tool_choice: a required call cannot be combined with a response format; leave one of them out",
                field="tool_choice",
            )
        if use.choice != AUTO and request.sampling.beam_search is not None:
            text = "tool_choice: a required call is not supported together with beam search"
            raise InvalidArgument(text, field="tool_choice")
        if not self._tokenizer.template.supports_tools:
            raise InvalidArgument("tools: this model's chat template does not show tools to the model", field="tools")
        if not request.sampling.detokenize:
            raise InvalidArgument(
                "tools: calls are parsed from the text, which requires detokenize=true", field="tools"
            )

    async def with_constraint(self, request: Request) -> Request:
        """Returns the request with the constraint that tool_choice asks for; constraints apply after the reasoning."""
        form, use = request.sampling.structured_output, request.tool_use
        must_call = use is not None and use.choice != AUTO
        if not request.parse_answer or not (form or must_call):
            return self._strict(request)
        answer = self._answer(request)
        place = await self._place_of_answers(request.prompts)
        if answer is None or (form is not None and use is None and place is AnswerStart.AFTER_REASONING):
            return request
        tag = constraint.structural_tag(constraint.after_reasoning(answer, self._reasoning, place), form)
        return replace(request, sampling=replace(request.sampling, structured_output=tag))

    def _strict(self, request: Request) -> Request:
        """Constrains the calls of strict tools, if any: free text, reasoning included, in which calls must match their
        grammar."""
        use = request.tool_use
        grammar = self._call_grammar(use) if use is not None else None
        if use is None or grammar is None or not any(map(grammar.enforces, use.tools)):
            return request
        marker = grammar.trigger or self._tool_format(use).tokens[0]
        text = call_grammar.free_text_with_calls(grammar, use.tools, marker, only_one=not use.parallel)
        if text is None:
            return request
        tag = constraint.structural_tag(text, None)
        return replace(request, sampling=replace(request.sampling, structured_output=tag))

    @staticmethod
    def with_client_field(error: InvalidArgument, request: Request) -> InvalidArgument:
        """Returns the error under the field that the client sent, since the constraint may come from the tools."""
        use = request.tool_use
        if error.field != FIELD or use is None or not (use.choice != AUTO or any(tool.strict for tool in use.tools)):
            return error
        return InvalidArgument(error.message.replace(FIELD, "tools", 1), field="tools")

    def _answer(self, request: Request) -> call_grammar.Json | None:
        """Returns the format of an answer: calls, content of the requested form, or either of them as the model
        chooses."""
        form, use = request.sampling.structured_output, request.tool_use
        options = []
        if use is not None and (grammar := self._call_grammar(use)) is not None:
            tools = [tool for tool in use.tools if use.name in ("", tool.name)]
            options.append(call_grammar.calls(grammar, tools, only_one=bool(use.name) or not use.parallel))
        if form is not None:
            if (content := constraint.to_structural_format(form)) is None:
                return None
            start = self._reasoning.content_start if self._reasoning is not None else ""
            options.append(call_grammar.sequence(start, content))
        return call_grammar.one_of(options)

    def _call_grammar(self, use: ToolUse) -> call_grammar.CallGrammar | None:
        """Returns the tool format's first grammar whose needed token the vocabulary has, None if there is none."""
        tool_format = self._tool_format(use)
        usable = (
            grammar
            for grammar in tool_format.grammars
            if not grammar.needs or self._tokenizer.token_id(grammar.needs) is not None
        )
        return next(usable, None)

    def _tool_format(self, use: ToolUse) -> ToolFormat:
        """Returns the model's native format, or plain JSON where a required call cannot be enforced in it."""
        if self._tools is None or (use.choice != AUTO and not self._tools.grammars):
            return registry.tool_format(PLAIN_JSON)
        return self._tools

    def _formats_for(self, request: Request) -> tuple[ReasoningFormat | None, ToolFormat | None]:
        """Returns the reasoning and tool formats of a request with parse_answer. Without tools, a tool format applies
        only if it frames plain text as well."""
        if request.tool_use is not None:
            return self._reasoning, self._tool_format(request.tool_use)
        return self._reasoning, self._tools if self._tools is not None and self._tools.frames_text else None

    def visible_tokens(self, request: Request) -> frozenset[str]:
        """Returns the special tokens that the parsers of a request with parse_answer need, which skip_special_tokens
        must not remove."""
        return frozenset(token for part in self._formats_for(request) if part is not None for token in part.tokens)

    def parsers(self, request: Request, prepared: Sequence[PreparedPrompt]) -> list[AnswerParser] | None:
        """Returns one parser per sample of a request with parse_answer, in the order of prompts and then of samples;
        None if the model's answers are plain text."""
        reasoning, tools = self._formats_for(request)
        if reasoning is None and tools is None:
            return None
        hidden = self._hidden(request)
        return [
            self._parser(
                request,
                reasoning,
                tools,
                hidden,
                self._place(prompt, self._end_of(prepared_prompt.last_token_ids(PROMPT_END))),
            )
            for prompt, prepared_prompt in zip(request.prompts, prepared, strict=True)
            for _ in range(request.sampling.n)
        ]

    def _hidden(self, request: Request) -> Markers | None:
        """Returns the markup that skip_special_tokens removes from answers in which no parser reads it."""
        if not request.sampling.skip_special_tokens:
            return None
        special = self._tokenizer.special_ids
        texts = [text for text in self.visible_tokens(request) if self._tokenizer.token_id(text) in special]
        return Markers(*texts, padding=no_padding) if texts else None

    @staticmethod
    def _parser(
        request: Request,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        hidden: Markers | None,
        place: AnswerStart,
    ) -> AnswerParser:
        """Builds the parser of one sample. `place` says whether the prompt ends in reasoning, `hidden` are markers
        to remove; more than one call is dropped unless parallel calls are allowed."""
        use = request.tool_use
        schemas = ToolSchemas(() if use is None else use.tools)
        probe = CallProbe() if tools is None else CallProbe(tools.read, tools.starts, schemas)
        is_open = place is AnswerStart.IN_REASONING
        thoughts, calls = _readers(reasoning, tools, schemas, is_open=is_open, probe=probe)
        return AnswerParser(
            thoughts,
            calls,
            new_id=call_id if tools is None else tools.new_id,
            most_calls=None if use is None or use.parallel else 1,
            wants_reasoning=request.include_reasoning,
            probe=probe,
            reasoning_ends=() if reasoning is None else reasoning.ends,
            hidden=hidden,
        )

    def _end_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def _place_of_answers(self, prompts: Sequence[Prompt]) -> AnswerStart:
        """Returns the one answer start of all prompts, which share their constraint; raises InvalidArgument if they
        differ."""
        first, *others = {await self._place_of_answer(prompt) for prompt in prompts}
        if others:
            text = "messages: a response format needs conversations that all begin within reasoning, or none"
            raise InvalidArgument(text, field="messages")
        return first

    async def _place_of_answer(self, prompt: Prompt) -> AnswerStart:
        """Returns the answer start of a prompt that is not tokenized yet, since constraints are checked first."""
        if self._reasoning is None or not isinstance(prompt, ChatPrompt):
            return AnswerStart.AFTER_REASONING
        if prompt.continue_final_message:
            return self._place(prompt, "")
        return self._place(prompt, await self._tokenizer.chat_renderer.prompt_end(prompt, END_CHARACTERS))

    def _place(self, prompt: Prompt, end: str) -> AnswerStart:
        """Returns where the answer begins.

        `end`: the end of the prompt's text. Many templates write the start of reasoning themselves, or its end where
        there is none.
        """
        if self._reasoning is None:
            return AnswerStart.AFTER_REASONING
        if isinstance(prompt, ChatPrompt) and prompt.continue_final_message:
            written = str(prompt.messages[-1].get("content") or "").lstrip()
            ended = any(text in written for text in self._reasoning.ends)
            is_open = written.startswith(self._reasoning.starts) and not ended
            return AnswerStart.IN_REASONING if is_open else AnswerStart.AFTER_REASONING
        end = end.rstrip()
        if end.endswith(self._reasoning.starts):
            return AnswerStart.IN_REASONING
        return AnswerStart.AFTER_REASONING if end.endswith(self._reasoning.ends) else AnswerStart.BEFORE_REASONING


def _with_known_spellings(reasoning: ReasoningFormat, tokenizer: Tokenizer) -> ReasoningFormat:
    """Puts the spellings first that are tokens of this vocabulary: checkpoints of a family may differ in them."""

    def known_first(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(texts, key=lambda text: tokenizer.token_id(text) is None))

    return replace(reasoning, starts=known_first(reasoning.starts), ends=known_first(reasoning.ends))


def _readers(
    reasoning: ReasoningFormat | None,
    tools: ToolFormat | None,
    schemas: ToolSchemas,
    *,
    is_open: bool,
    probe: CallProbe,
) -> tuple[MarkupReader | None, MarkupReader | None]:
    """Returns the readers for reasoning and for calls; one for both where the format has messages for both."""
    whole = reasoning.read_answer if reasoning is not None else None
    if whole is not None and (tools is None or tools.read_answer is whole):
        return None, MarkupReader(lambda scan, writer: whole(scan, writer, is_open, schemas.__contains__))
    return (
        None if reasoning is None else MarkupReader(partial(_read_reasoning, reasoning, is_open, probe)),
        None if tools is None else MarkupReader(partial(_read_calls, tools, schemas), schemas.__contains__),
    )


def _read_reasoning(
    reasoning: ReasoningFormat, is_open: bool, calls: CallProbe, scan: Scanner, writer: EventWriter
) -> Steps[None]:
    return reasoning.read(scan, writer, is_open, calls)


def _read_calls(tools: ToolFormat, schemas: ToolSchemas, scan: Scanner, writer: EventWriter) -> Steps[None]:
    return tools.read(scan, writer, schemas)
