"""`quire bench`: what Quire costs and carries. A module a mode; the rest is shared by them."""
