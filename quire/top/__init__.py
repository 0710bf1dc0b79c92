"""A cluster as a picture of characters: made of values, so that it can be drawn anywhere."""
