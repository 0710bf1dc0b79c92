"""Reasoning of Magistral: [THINK]…[/THINK]"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format("[THINK]", "[/THINK]")
