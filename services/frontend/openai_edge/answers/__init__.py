"""What is written of a generation: whole answers, chunks of streams, and what is in them."""
