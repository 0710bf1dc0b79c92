"""Parsers of reasoning and tool calls in an answer's text. Pure: text in, events out."""
