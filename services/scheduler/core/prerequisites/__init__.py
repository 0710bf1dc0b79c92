"""What sequences wait for before they can run: each kind is a Prerequisite with one life cycle (port.py)."""
