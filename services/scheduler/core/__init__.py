"""What runs next on one worker. Two verbs change it: schedule() and apply(). Pure: times and seeds are arguments."""
