"""Outputs of a given form: grammars compiled off the steps' path, masks filled beside the forward pass."""
