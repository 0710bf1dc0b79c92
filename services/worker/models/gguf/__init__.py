"""The tensors of GGUF files, by the names and in the order that transformers gives them."""
