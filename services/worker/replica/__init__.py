"""A worker replica: slots, blocks and the runner of its steps, and components for everything else on the device."""
