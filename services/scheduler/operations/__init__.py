"""What operators do to all workers at once, and how workers that come later catch up."""
