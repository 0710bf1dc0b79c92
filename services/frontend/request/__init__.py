"""What a client asked, in values that both edges make: prompts, conversations, tools."""
