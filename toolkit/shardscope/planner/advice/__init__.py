"""How advice is found: plans tried, questions asked, words for both. ``advice.py`` puts them in order."""
