"""Gemma 4: <|channel>thought
…<channel|>"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited

FORMAT = replace(delimited("<|channel>thought", "<channel|>"), tokens=("<|channel>", "<channel|>"))
