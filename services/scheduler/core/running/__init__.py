"""The sequences that hold slots, as columns, and the beam searches among them."""
