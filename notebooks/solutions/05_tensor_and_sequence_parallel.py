"""Solutions of notebook 05, which run after its first cell."""

# %% 05-stored-in-full
answer = ["norms", "residuals"]

# %% 05-all-reduce-bytes
answer = 4 * 2 * 4096 * 1 * 8192 / 1e6

# %% 05-inside-a-node
answer = ss.Layout.megatron(tp=8, sequence_parallel=True)
