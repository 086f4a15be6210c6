"""Transports of overlapped ops: who sends what to whom, and when it has arrived."""
