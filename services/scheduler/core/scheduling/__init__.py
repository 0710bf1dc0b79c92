"""What schedule() and apply() consist of: running sequences grow, waiting ones come in, results are taken in."""
