"""One loss curve under every framework: ``python -m tests.parity`` (``make parity``)."""
