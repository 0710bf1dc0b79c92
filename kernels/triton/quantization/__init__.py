"""Products with quantized weights, and sums of their parts."""
