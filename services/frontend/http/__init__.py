"""What HTTP faces have in common: the server, what headers say, and answers in one piece or as server-sent events."""
