"""Speculative decoding: drafting methods, and the recording of accepted drafts; see README.md."""
