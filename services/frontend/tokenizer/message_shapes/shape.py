"""Shape of messages that one chat template reads completely."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

Content = Literal["given", "text", "parts"]  # as the client wrote it, joined to one text, wrapped as a list of parts
TURN_CONTENT = ("user", "system", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class MessageShape:
    """Choices for one template. The defaults are the shape that transformers passes to templates."""

    user: Content = "given"
    system: Content = "given"
    assistant: Content = "given"
    tool: Content = "given"
    # developer role kept, kept only where no system turn exists, or replaced by the system role
    developer: Literal["kept", "alone", "system"] = "kept"
    # system turns: unchanged, late ones moved to the first, all merged into one, or merged into the first user turn
    system_turns: Literal["kept", "early", "merged", "user"] = "kept"
    user_turns: Literal["kept", "merged"] = "kept"  # consecutive turns
    assistant_turns: Literal["kept", "merged"] = "kept"  # consecutive turns without calls
    # content of a turn with calls and without text; "given": an empty text stays, null is omitted
    call_content: Literal["given", "absent", "empty", "null"] = "given"
    arguments: Literal["object", "flat", "text"] = "object"  # "flat": an object whose lists and objects are JSON text
    # "nine": nine letters or digits; "function": functions.NAME:NUMBER, where only the id shows the name
    call_ids: Literal["given", "nine", "function"] = "given"
    result_names: Literal["given", "function"] = "given"  # "function": a result carries the name of its function
    # "tagged": written into the content as JSON between <tool_call> and </tool_call>; "text": as JSON alone
    calls: Literal["native", "tagged", "text"] = "native"
    results: Literal["tool", "user"] = "tool"  # the role of a tool's result
    parallel_calls: Literal["together", "split"] = "together"  # "split": one turn per call
    # text and calls of one turn; "gathered": in separate turns, texts between two user turns merged into the last of
    # them
    call_text: Literal["together", "split", "gathered"] = "together"
    reasoning: Literal["fields", "parts"] = "fields"  # "parts": a content part of type thinking
    # reasoning, text and calls of one turn; "joined": the text follows the reasoning in the reasoning's field
    call_reasoning: Literal["together", "split", "joined"] = "together"

    # a user turn after a tool's result; "answered": an assistant turn, ANSWER, is inserted between them
    after_results: Literal["kept", "answered"] = "kept"
    # pictures: parts of type image, which the template writes as placeholders, or placeholders before the turn's text
    pictures: Literal["parts", "text"] = "parts"
    result_pictures: Literal["kept", "user"] = "kept"  # pictures in tools' results; "user": in a user turn after them
    tools: Literal["null", "list"] = "null"  # value where no tools are offered

    def changes(self) -> dict[str, str]:
        """Returns the fields and values that differ from the shape in which transformers passes messages."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def describe(self) -> str:
        """Returns the changes as one line of text."""
        return ", ".join(f"{name}={value}" for name, value in self.changes().items()) or "as in transformers"

    def as_fields(self) -> dict[str, str]:
        """Returns every choice, for a structured log line."""
        return asdict(self)
