"""From logits to tokens: one feature a file, each with its own buffers by slot; the sampler lists them."""
