"""Reasoning of Gemma 4: <|channel>thought
…<channel|>"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = replace(delimited_format("<|channel>thought", "<channel|>"), tokens=("<|channel>", "<channel|>"))
