"""Bytes that a rank holds."""
