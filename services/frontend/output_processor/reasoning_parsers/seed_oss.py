"""Reasoning of Seed-OSS: <seed:think>…</seed:think>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format("<seed:think>", "</seed:think>")
