"""One module for each way of changing logits, and what they have in common."""
