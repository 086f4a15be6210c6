"""Process groups, DTensor shards and the parts of torch.distributed that differ by version."""
