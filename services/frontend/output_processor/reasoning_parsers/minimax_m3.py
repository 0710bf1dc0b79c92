"""Reasoning of MiniMax M3: <mm:think>…</mm:think>; answers without reasoning contain only the end marker."""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format("<mm:think>", "</mm:think>", end_alone=True)
