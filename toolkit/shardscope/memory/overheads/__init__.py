"""Memory beside a step's tensors: libraries, the allocator, and host memory while a model is loaded."""
