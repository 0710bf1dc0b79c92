"""Reasoning of ERNIE 4.5: <think>…</think><response>…</response>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format, simple_frame

FORMAT = delimited_format("<think>", "</think>", frame=simple_frame("<response>", "</response>"))
