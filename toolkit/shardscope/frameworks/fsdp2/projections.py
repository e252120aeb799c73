"""How tensor parallelism cuts each projection of a decoder layer. No torch: exports name them too."""

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc")
"""Projections out of the stream: each rank has some of their outputs."""
ROWS = ("o_proj", "down_proj", "c_proj")
"""Projections back into the stream: each rank has some of their inputs, and their sums are reduced."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of single heads, which each rank applies to its own."""
