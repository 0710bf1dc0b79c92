"""Services of tests are forked from processes that have imported what they need: two thirds of a start are imports.

Only what quire.cluster starts with the environment of the test run is. A test that sets variables of its own, the
commands of users (`quire up`, `quire worker`) and what services start themselves begin as they always do.
"""
