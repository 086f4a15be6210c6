"""The NCCL binding and its transport. Not yet run on GPUs."""
