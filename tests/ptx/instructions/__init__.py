"""Instructions of PTX."""
