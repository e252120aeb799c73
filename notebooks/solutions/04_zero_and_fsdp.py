"""Solutions of notebook 04, which run after its first cell."""

# %% 04-zero-2-bytes
answer = (2 * 7.5e9 + 14 * 7.5e9 / 64) / 1e9

# %% 04-all-gathers
answer = 32 + 32 + 1

# %% 04-slow-links
answer = ss.Layout.zero(stage=2, overlap_comm=True)
