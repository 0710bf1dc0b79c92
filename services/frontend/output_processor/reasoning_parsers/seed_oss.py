"""Seed-OSS: <seed:think>…</seed:think>"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited

FORMAT = delimited("<seed:think>", "</seed:think>")
