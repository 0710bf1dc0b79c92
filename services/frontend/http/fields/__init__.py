"""Fields of JSON bodies: their types, their ranges, and the policy for unknown ones."""
