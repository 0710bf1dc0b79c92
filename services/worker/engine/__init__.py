"""Execution of plans: commands enter and results leave on the event loop, the device threads work in between."""
