"""The demo: one GPT trained by plain PyTorch and by this package, side by side."""
