"""Mixtures of experts: routing, the order of tokens by expert, and tokens in that order and back."""
