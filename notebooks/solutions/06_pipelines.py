"""Solutions of notebook 06, the last of which runs after its cell 8."""

# %% 06-bubble
answer = 100 * (8 - 1) / (4 * 32)

# %% 06-in-flight
answer = 8 - 2

# %% 06-shrink-the-bubble
answer = replace(
    large,
    layout=replace(large.layout, vpp=5),
    recipe=replace(large.recipe, micro_batch_size=1),
)
