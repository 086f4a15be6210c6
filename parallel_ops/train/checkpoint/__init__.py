"""Writing, verifying, finding and resuming from checkpoints."""
