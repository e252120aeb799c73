"""What all frameworks' memory models share: who holds which bytes, and when."""
