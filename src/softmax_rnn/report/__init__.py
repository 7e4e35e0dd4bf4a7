"""Reports on finished runs: a table with confidence intervals, a figure, an HTML page."""
