"""Text encoders of encoder-decoder models: their hidden states are what the decoders attend to."""
