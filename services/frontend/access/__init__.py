"""Access control: API keys, their permissions, and the usage of their owners."""
