"""Predicted memory and step time of one plan or of columns of many, and the recipes that a framework
supports.
"""
