"""What a trace says, computed from its columns."""
