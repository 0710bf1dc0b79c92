"""Hunyuan A13B: <think>…</think><answer>…</answer>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited, framed

FORMAT = delimited("<think>", "</think>", frame=framed("<answer>", "</answer>"))
