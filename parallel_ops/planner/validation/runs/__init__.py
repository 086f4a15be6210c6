"""Published runs of 2024 to 2026; README.md has the columns. A package, so that the files are installed."""
