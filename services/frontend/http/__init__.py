"""Parts shared by all HTTP APIs: server, middleware, body validation, and responses in one piece or as server-sent
events."""
