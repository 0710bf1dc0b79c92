"""What comes from frontends and goes to them: sessions, submissions, one TokenBatch a step."""
