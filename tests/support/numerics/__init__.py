"""Checks of ops against fp64, and of calls and launches."""
