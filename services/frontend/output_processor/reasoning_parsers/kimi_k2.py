"""Reasoning of Kimi K2: <think>…</think>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format("<think>", "</think>")
