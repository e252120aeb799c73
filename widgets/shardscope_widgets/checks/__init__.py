"""The checks view: findings of a plan and of the user's own script."""
