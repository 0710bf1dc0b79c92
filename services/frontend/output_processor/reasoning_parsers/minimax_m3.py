"""MiniMax M3: <mm:think>…</mm:think>, of which only the end is there in answers without reasoning."""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format("<mm:think>", "</mm:think>", end_alone=True)
