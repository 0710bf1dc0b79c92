"""Structured output: grammars compiled outside of the step loop, and masks filled during the forward pass."""
