"""The command line ``parallel-ops``: ``app`` has the commands, ``inputs`` reads their arguments, ``tables`` prints."""
