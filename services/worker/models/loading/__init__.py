"""From the files of a checkpoint to the weights of a model, at the start and while it runs."""
