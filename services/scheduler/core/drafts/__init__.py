"""Speculative decoding: the draft length of each step, and the results of drafts."""
