"""What views share: controls, theme, charts, tabs, clickable tables, numbers and the front-end loader."""
