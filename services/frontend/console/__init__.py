"""The web console at /: a playground, the state of the cluster, and timings of requests. Works offline."""
