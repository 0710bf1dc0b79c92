"""The load generator: arrival times of requests, protocols, and measured timings."""
