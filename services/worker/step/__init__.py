"""Host side of a step: applies plans to slots and block tables and builds the arrays of a forward pass."""
