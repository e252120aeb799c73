"""What to do about a plan: the changes that mend it."""
