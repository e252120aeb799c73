"""What a run was: why it failed, what it measured, beside others and its prediction."""
