"""Forks the services of tests from processes that have already imported their modules: imports are two thirds of a
start.

Applies only to services started by quire.cluster with the environment of the test run. Tests that set other
variables, user commands (`quire up`, `quire worker`) and children of services start normally.
"""
