"""One worker replica: slots, blocks and the device together, and the parts that it has beside its steps."""
