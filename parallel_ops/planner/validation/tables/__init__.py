"""Published tables, each with its source. A package, so that the files are installed."""
