"""``trace.summary()``: what costs most in a trace, as sentences, each with the change of the plan that helps.

``summary.py`` combines ``causes.py`` and ``suggestions.py``; ``many_ranks.py`` does so over many ranks.
"""
