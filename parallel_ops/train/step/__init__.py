"""One optimizer step: forward and backward, reductions, update; and the evaluation."""
