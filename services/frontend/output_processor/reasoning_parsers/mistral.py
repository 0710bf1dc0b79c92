"""Magistral: [THINK]…[/THINK]"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited

FORMAT = delimited("[THINK]", "[/THINK]")
