"""FSDP2 memory formulas: training state, all-gather buffers and peak candidates of one rank."""
