"""Arithmetic on one plan's numbers or on columns of many plans', each distinct value computed once."""
