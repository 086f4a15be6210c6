"""Processes of a group, and how they fail."""
