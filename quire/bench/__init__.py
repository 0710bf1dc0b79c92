"""`quire bench`: performance measurements. One module per mode; the other packages are shared."""
