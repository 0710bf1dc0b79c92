"""Plain values that several packages of the scheduler share."""
