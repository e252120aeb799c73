"""DeepSpeed really training."""
