"""What a checkpoint's folder says: where it is found, which model it is, and how its texts are read."""
