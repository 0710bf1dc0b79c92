"""`quire bench`: what Quire costs and carries. One module a mode; measuring, loads and reports are shared."""
