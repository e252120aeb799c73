"""A package for each framework, and two registries: ``registry.py`` (formulas) and ``engines.py``
(training, rehearsal, exports).
"""
