"""Messages to the text that the model reads: short conversations at once, the others in a process of their own."""
