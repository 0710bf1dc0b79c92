"""The client of a load: when its requests come, over which API, and what it saw of them."""
