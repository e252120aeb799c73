"""Parts of the supervisor: its process, the stop of a run, its end, and what its ranks leave behind."""
