"""A plan as other tools' own files, and back: ``plan.export(folder)`` and ``Plan.from_...(file)``."""
