"""Forks services, their child processes and commands of tests from processes that have imported their modules already:
imports are two thirds of a start.

Applies to services started by quire.cluster and to children of services that run in the test's own process, both with
the environment of the test run, and to commands that tests run through command.py. Tests that set other variables, and
those of what only a new interpreter shows, start processes normally.
"""
