"""What forward leaves for backward, the loss, and what backward holds."""
