"""DeepSpeed engines, which run the training."""
