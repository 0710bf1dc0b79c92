"""How model families write tool calls: a file for each format, `FORMAT` in it."""
