"""Solutions of notebook 01."""

# %% 01-bytes-per-parameter
answer = 2 + 2 + 4 + 4 + 4

# %% 01-state-of-8b
import shardscope as ss

answer = 16 * ss.models["llama-3.1-8b"].num_parameters / 1e9

# %% 01-activations-of-a-layer
s, b, h, a = 2048, 1, 12288, 96
answer = s * b * h * (34 + 5 * a * s / h) / 1e9
