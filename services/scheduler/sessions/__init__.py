"""The calls that workers and frontends dial in with, and how a scheduler leaves them."""
