"""Reasoning of Solar Open: <|think|>…<|end|><|begin|>assistant<|content|>…<|end|>"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import ReasoningFrame, delimited_format

BEGIN, CONTENT, END = "<|begin|>assistant", "<|content|>", "<|end|>"
FORMAT = replace(
    delimited_format("<|think|>", END, frame=ReasoningFrame((f"{BEGIN}{CONTENT}", CONTENT), END)),
    tokens=("<|think|>", "<|begin|>", CONTENT, END),
    after_end=BEGIN,
    content_start=CONTENT,
)
