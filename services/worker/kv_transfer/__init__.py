"""KV of whole blocks between workers: read here for others, fetched from others for this one."""
