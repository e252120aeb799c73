"""Activations: what forward saves for backward, the output head and loss, and the peak of backward."""
