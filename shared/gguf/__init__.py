"""GGUF, llama.cpp's files: a model, its configuration and its tokenizer in one. Read without torch."""
