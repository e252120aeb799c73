"""Decisions about plans: search, advice, checks, verdicts, claims, and changes that make a plan fit."""
