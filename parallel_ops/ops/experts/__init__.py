"""Ops of mixture-of-experts layers."""

from parallel_ops.ops.experts.grouped_linear import grouped_linear, grouped_linear_reference

__all__ = ["grouped_linear", "grouped_linear_reference"]
