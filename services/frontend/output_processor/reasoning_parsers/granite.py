"""Reasoning of Granite 3.2, marked by sentences: Here is my thought process: … Here is my response: …"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import delimited_format

FORMAT = delimited_format(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
