"""The preflight: what of a plan, a task or a script runs, but badly, and what mends it."""

from __future__ import annotations

from shardscope.planner.preflight.finding import SEVERITIES, Finding, Severity

__all__ = ["SEVERITIES", "Finding", "Severity"]
