"""Mixtures of experts: who takes which, and the products. A single token's: single_row/row_experts.py."""
