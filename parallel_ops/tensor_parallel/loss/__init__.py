"""Cross-entropies over a vocabulary that is sharded over a group."""
