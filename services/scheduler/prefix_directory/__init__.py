"""What this scheduler tells the others through Redis, off the step path."""
