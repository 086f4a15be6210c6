"""Pipelines and results as text, SVG and HTML."""
