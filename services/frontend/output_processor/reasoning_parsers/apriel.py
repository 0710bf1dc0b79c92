"""Reasoning of Apriel: Here are my reasoning steps: … [BEGIN FINAL RESPONSE] … [END FINAL RESPONSE]

The first line is part of the prompt where the template is that of Apriel 1.6.
"""

from quire.services.frontend.output_processor.parsing.markup.delimited_reasoning import ReasoningFrame, delimited_format

FORMAT = delimited_format(
    "Here are my reasoning steps:",
    "[BEGIN FINAL RESPONSE]",
    frame=ReasoningFrame((), "[END FINAL RESPONSE]", may_be_open=True),
)
