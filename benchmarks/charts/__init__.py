"""Charts of results, as SVG."""
