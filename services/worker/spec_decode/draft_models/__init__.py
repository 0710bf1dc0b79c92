"""What methods with weights share: passes over the model's blocks, how drafts are drawn, published heads."""
