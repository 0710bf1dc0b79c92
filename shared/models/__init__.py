"""Contents of a checkpoint's folder: where it is found, which model it is, and how its texts are processed."""
