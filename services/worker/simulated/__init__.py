"""Workers without a device, for tests and capacity planning: they keep the protocol and the timing, and
invent tokens."""
