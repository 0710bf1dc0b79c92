"""Reading an answer's text for what is not plain content: reasoning and tool calls. Pure: text in, events out."""
