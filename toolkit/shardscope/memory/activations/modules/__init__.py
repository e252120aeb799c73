"""What each family's modules save in forward for backward, tensor by tensor, in bytes for one token."""
