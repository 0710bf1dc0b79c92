"""Reasoning of Hunyuan A13B: <think>…</think><answer>…</answer>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format, simple_frame

FORMAT = delimited_format("<think>", "</think>", frame=simple_frame("<answer>", "</answer>"))
