"""The main button: what it offers to launch, where, and the free memory there."""
