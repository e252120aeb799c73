"""The memory view: bars by component, the course of one step, repairs, and the rehearsal button."""
