"""DDP memory formulas: training state and peak candidates of one rank."""
