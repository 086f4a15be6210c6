"""Weight gradients apart from input gradients, and norms of gradients."""
