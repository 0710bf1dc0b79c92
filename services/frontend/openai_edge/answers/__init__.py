"""Response formats: whole answers, chunks of streams, and their parts."""
