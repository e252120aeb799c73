"""What libraries, the allocator and the making of a model take beside a step's tensors."""
