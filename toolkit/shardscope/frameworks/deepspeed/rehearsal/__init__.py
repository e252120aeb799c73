"""DeepSpeed's own code on fake tensors."""
