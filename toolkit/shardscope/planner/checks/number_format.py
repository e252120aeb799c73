"""Number formats of findings."""

from __future__ import annotations


def format_percent(share: float) -> str:
    """Format a share with two significant digits below ten: ``12 %``, ``0.4 %``."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.2g} %"


def format_bandwidth(bytes_per_second: float) -> str:
    """Format a bandwidth: ``450 GB/s``, ``3.1 GB/s``."""
    value = bytes_per_second / 1e9
    return f"{value:,.0f} GB/s" if value >= 9.95 else f"{value:.2g} GB/s"
