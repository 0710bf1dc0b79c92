"""LoRA adapters for quire-tiny: two styles of answering."""
