"""Which worker a sequence goes to, and the KV blocks that workers read from each other for it."""
