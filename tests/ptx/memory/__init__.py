"""Memory of the executor."""
