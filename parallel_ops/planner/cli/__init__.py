"""The command line ``parallel-ops``: commands (``app``), their arguments (``inputs``) and output (``tables``)."""
