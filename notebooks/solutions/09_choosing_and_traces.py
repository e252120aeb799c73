"""Solutions of notebook 09."""

# %% 09-simplest-layout
answer = "ddp"

# %% 09-exposed-share
answer = 100 * (300 - 220) / (600 + (300 - 220) + 40)

# %% 09-utilization
import shardscope as ss

flops = 5762 * ss.models["llama-3.1-8b"].flops_per_token(8192)
answer = 100 * flops / ss.gpus["h100-sxm-80gb"].peak_flops["bf16"]
