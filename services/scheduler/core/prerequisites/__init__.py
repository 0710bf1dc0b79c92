"""Prerequisites of sequences: each kind of thing that they wait for has the life cycle of port.py."""
