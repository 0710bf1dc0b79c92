"""Runs a step on the device, from inputs to tokens."""
