"""Loss curves and memory of every framework compared with one process: ``make parity``."""
