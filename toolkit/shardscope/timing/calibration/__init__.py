"""What this machine itself measured: curves, the rates fitted to them, and where both are kept."""
