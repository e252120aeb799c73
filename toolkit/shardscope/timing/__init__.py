"""How long a step takes: arithmetic by class of operator, collectives by link, pipelines, the host."""
