"""What a plan comes to: slots, block tables and the flat arrays that a forward pass reads. Host side only."""
