"""Markup of calls and reasoning that several formats share."""
