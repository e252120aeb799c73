"""The checks view: findings of a plan, and of a user's own script."""
