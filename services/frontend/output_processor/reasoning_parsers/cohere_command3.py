"""Command A and R7B: <|START_THINKING|>…<|END_THINKING|><|START_RESPONSE|>…<|END_RESPONSE|>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited, framed

FORMAT = delimited("<|START_THINKING|>", "<|END_THINKING|>", frame=framed("<|START_RESPONSE|>", "<|END_RESPONSE|>"))
