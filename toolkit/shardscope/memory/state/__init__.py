"""Parameters, gradients and optimizer state on one rank of a pipeline stage."""
