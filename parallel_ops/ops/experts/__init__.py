"""Mixtures of experts: the router, the order of tokens by expert, tokens in that order and back, and the linears."""
