"""All that a scheduler looks after: workers, frontends, where each sequence is, and what everybody must agree on."""
