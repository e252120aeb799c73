"""Shared parts of the views: controls, theme, charts, tabs, clickable tables, numbers, front-end loader."""
