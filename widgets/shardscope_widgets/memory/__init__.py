"""The memory view: bars by component, the timeline of one step, fixes, and the rehearsal button."""
