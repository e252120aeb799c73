"""Arithmetic on the numbers of one plan or the columns of many, each distinct value computed once."""
