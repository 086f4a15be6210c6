"""How ring attention runs over a transport: ring, Ulysses, and both together."""
