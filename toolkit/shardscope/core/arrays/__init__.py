"""Arithmetic on one plan or on columns of many: the same formulas, each distinct value computed once."""
