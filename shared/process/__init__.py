"""Lifecycle of a service's process: event loop, tasks, child processes, garbage collection and termination."""
