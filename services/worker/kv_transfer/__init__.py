"""Transfer of whole KV blocks between workers: serving them, and fetching them."""
