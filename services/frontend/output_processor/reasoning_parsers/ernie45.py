"""ERNIE 4.5: <think>…</think><response>…</response>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited, framed

FORMAT = delimited("<think>", "</think>", frame=framed("<response>", "</response>"))
