"""Encoder-only models: BERT and its successors."""
