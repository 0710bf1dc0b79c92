"""Processing of sound that frontends and workers share: decoding, resampling and log-mel features."""
