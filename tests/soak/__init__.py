"""Many launches with faults: ``python -m tests.soak`` ends with what they left behind, which is nothing."""
