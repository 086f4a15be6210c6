"""The best plan for a model on a cluster."""
