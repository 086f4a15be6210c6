"""Token files and datasets, packed into samples, read as batches."""
