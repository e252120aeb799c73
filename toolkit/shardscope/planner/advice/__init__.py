"""``ss.recommend``: the questions of advice, the plans that it tries, and its text. ``advice.py`` puts
them in order.
"""
