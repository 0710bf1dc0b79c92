"""Reasoning of Kimi K3: <|open|>think<|sep|>…<|close|>think<|sep|><|open|>response<|sep|>…<|close|>response<|sep|>, the
calls, and
<|close|>message<|sep|>

The prompt ends with the first tag of the two elements that comes."""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import ReasoningFrame, delimited_format

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
RESPONSE = f"{OPEN}response{SEPARATOR}"
FORMAT = replace(
    delimited_format(
        f"{OPEN}think{SEPARATOR}",
        f"{CLOSE}think{SEPARATOR}",
        frame=ReasoningFrame(
            (RESPONSE,), f"{CLOSE}response{SEPARATOR}", may_be_open=True, after=f"{CLOSE}message{SEPARATOR}"
        ),
    ),
    tokens=(OPEN, CLOSE, SEPARATOR),
    content_start=RESPONSE,
)
