"""Decisions about plans: search, advice, checks, verdicts, and the changes that make a plan fit."""
