"""Builds a replica from settings: configuration, environment, model, step execution, KV memory."""
