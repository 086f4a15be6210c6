"""Bytes between ranks, and the time they take."""
