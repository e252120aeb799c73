"""Real training: the tasks that Shardscope ships, and the pieces that the PyTorch engines share."""
