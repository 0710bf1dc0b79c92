"""What somebody who means harm may send, and what others notice of it."""
