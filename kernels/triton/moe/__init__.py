"""Mixture of experts: routing and the experts' products. For single tokens: single_row/row_experts.py."""
