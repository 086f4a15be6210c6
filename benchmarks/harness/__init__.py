"""One harness for everything that measures time: turns and medians, ranks, environments, rows, tables."""
