"""A person's own training code: read, mended by a click, and never run."""
