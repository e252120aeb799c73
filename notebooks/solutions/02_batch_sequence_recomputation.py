"""Solutions of notebook 02, which run after its first cell."""

# %% 02-micro-batches
answer = 512 / (2 * (64 / 2))

# %% 02-recomputation-saves
answer = (34 + 80) / 2

# %% 02-make-it-fit
answer = replace(plan, recipe=replace(plan.recipe, micro_batch_size=2, recompute="selective"))
