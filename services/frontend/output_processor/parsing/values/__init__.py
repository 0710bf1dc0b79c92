"""Values as models write them: JSON, Python and plain text, streamed and repaired as JSON."""
