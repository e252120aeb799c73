"""The formulas of a step's time: matmuls, collectives, pipeline, optimizer, offload; and the step report."""
