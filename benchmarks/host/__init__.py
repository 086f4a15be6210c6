"""The host's time of calls on a GPU."""
