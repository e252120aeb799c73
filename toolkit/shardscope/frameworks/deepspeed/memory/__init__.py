"""DeepSpeed memory formulas: training state, buffers and peak candidates of one rank."""
