"""Fields of JSON bodies: types, ranges, and the policy for unknown fields."""
