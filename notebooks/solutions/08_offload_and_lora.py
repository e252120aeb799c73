"""Solutions of notebook 08, which run after its first cell."""

# %% 08-lora-parameters
answer = 16 * ((4096 + 4096) + (4096 + 1024)) * 32

# %% 08-qlora-weights
import shardscope as ss

groups = ss.models["llama-3.1-70b"].parameter_groups
bits = 4 + 8 / 64 + 32 / (64 * 256)
answer = (groups["attention"] + groups["mlp"]) * bits / 8 / 1e9

# %% 08-one-gaming-gpu
answer = replace(plan, recipe=replace(plan.recipe, method="qlora"))
