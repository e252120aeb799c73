"""Other tools' configuration files: values that know their lines, and what a file has no words for."""
