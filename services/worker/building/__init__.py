"""From settings to a replica, step by step: what is wanted, on what, the model, what computes steps, the memory."""
