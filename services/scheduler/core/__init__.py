"""Scheduling of one worker, with two verbs: schedule() and apply(). Pure: times and results are arguments."""
