"""What runs have shown: a table with intervals, a figure, an HTML page."""
