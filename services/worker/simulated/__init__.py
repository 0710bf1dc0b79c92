"""Workers without a device: they keep the protocol and the time, and make up the tokens. For tests and planning."""
