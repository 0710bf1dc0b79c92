"""One step on the device, from inputs to tokens."""
