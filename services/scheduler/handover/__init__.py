"""KV that goes from one worker to another: a cached prefix, or what a prefill worker has computed."""
