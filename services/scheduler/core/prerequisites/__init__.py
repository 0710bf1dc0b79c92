"""What sequences wait for before they can run."""
