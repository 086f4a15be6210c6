"""Experts that ranks share: dispatch of tokens to them, and their balance."""

from parallel_ops.expert_parallel.balance import AuxiliaryLosses, update_selection_bias
from parallel_ops.expert_parallel.dispatch import Dispatch, ExpertInputs

__all__ = ["AuxiliaryLosses", "Dispatch", "ExpertInputs", "update_selection_bias"]
