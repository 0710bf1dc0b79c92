"""Magistral: [THINK]…[/THINK]"""

from quire.services.frontend.output_processor.parsing.delimited_reasoning import delimited

FORMAT = delimited("[THINK]", "[/THINK]")
