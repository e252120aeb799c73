"""Memory other than a step's tensors: libraries, the allocator, host memory while a model is loaded."""
