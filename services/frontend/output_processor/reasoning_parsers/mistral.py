"""Magistral: [THINK]…[/THINK]"""

from services.frontend.output_processor.parsing.delimited_reasoning import delimited

FORMAT = delimited("[THINK]", "[/THINK]")
