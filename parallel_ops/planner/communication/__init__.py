"""Communication: bytes between ranks and their time."""
