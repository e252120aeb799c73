"""Solutions of notebook 07."""

# %% 07-ring-bytes
answer = 2 * 2 * (131072 / 8) * (8 * 128) * (8 - 1) / 1e6

# %% 07-causal-balance
answer = (1 - (7 / 8) ** 2) / (1 / 8)

# %% 07-expert-weights
import shardscope as ss

mixtral = ss.models["mixtral-8x7b"]
experts = mixtral.parameter_groups["experts"]
answer = 2 * (experts / 8 + mixtral.num_parameters - experts) / 1e9
