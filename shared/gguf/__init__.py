"""GGUF, llama.cpp's file format: a model, its configuration and its tokenizer in one file. Read without torch."""
