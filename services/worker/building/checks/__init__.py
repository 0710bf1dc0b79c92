"""What settings exclude, by what the model, the device and the ranks can do."""
