"""Parts of schedule(): advancing running sequences, admission and preemption."""
