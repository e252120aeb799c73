"""DeepSpeed rehearsal: DeepSpeed's own engine on fake tensors."""
