"""Prerequisites of sequences: each kind of resource that they wait for has the life cycle of port.py."""
