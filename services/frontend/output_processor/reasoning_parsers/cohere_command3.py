"""Reasoning of Command A and R7B: <|START_THINKING|>…<|END_THINKING|><|START_RESPONSE|>…<|END_RESPONSE|>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format, simple_frame

FORMAT = delimited_format(
    "<|START_THINKING|>", "<|END_THINKING|>", frame=simple_frame("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
