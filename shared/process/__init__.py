"""How the process of a service lives: its loop, its tasks and children, its pauses, and what ends it."""
