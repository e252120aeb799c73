"""Memory and precision that a rank really has, read from its tensors and its device."""
