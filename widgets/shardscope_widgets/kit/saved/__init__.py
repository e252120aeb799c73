"""Views for readers without a kernel: the picture in a saved notebook, and pages that work from disk."""
