"""The objects that a user describes: model, GPUs, recipe, layout, plan; findings; errors that refuse bad
values.
"""
