"""Trains the vision tower and projector of quire-tiny; the text model's weights are frozen."""
