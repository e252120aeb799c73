"""Writing and reading other tools' configuration files: the parts that frameworks share."""
