"""Reasoning of Hunyuan 3: <think>…</think>, in published checkpoints <think:opensource>…</think:opensource>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format(("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"))
