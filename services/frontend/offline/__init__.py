"""Work that nobody waits for: files, and batches of calls whose answers are files."""
