"""Grammar libraries behind the port: a file each, and who chooses among them."""
