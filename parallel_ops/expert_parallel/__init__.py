"""Experts that ranks share: dispatch of tokens to them, and their balance."""

from parallel_ops.expert_parallel.balance import AuxiliaryLosses, StageExpertLoad, update_selection_bias
from parallel_ops.expert_parallel.dispatch import Dispatch, ExpertInputs

__all__ = ["AuxiliaryLosses", "Dispatch", "ExpertInputs", "StageExpertLoad", "update_selection_bias"]
