"""Uneven use of experts: the load of the fullest rank, and what a capacity drops.

Loads of experts are taken as normal around their mean, 1, and independent. The fullest of n has z(n) deviations more,
z(n) = Phi^-1((n - 3/8) / (n + 1/4)) (Blom 1958); the mean of e experts has 1 / sqrt(e) of the deviation.

    deviation   s = (imbalance - 1) / z(experts)
    rank        1 + s z(ranks) / sqrt(experts / ranks)
    dropped     E max(0, load - c) = s phi(u) - (c - 1) (1 - Phi(u)), u = (c - 1) / s, of the routed tokens
"""

import math
from functools import lru_cache
from statistics import NormalDist

_NORMAL = NormalDist()


def _fullest(number: int) -> float:
    """z of ``number``."""
    return _NORMAL.inv_cdf((number - 0.375) / (number + 0.25))


@lru_cache(maxsize=1024)
def rank_load(imbalance: float, experts: int, ranks: int) -> float:
    """Load of the fullest of ``ranks`` that share ``experts``, over the mean. ``imbalance``: that of the fullest
    expert."""
    if imbalance == 1 or ranks == 1:
        return 1.0
    return min(ranks, 1 + (imbalance - 1) * _fullest(ranks) / _fullest(experts) / math.sqrt(experts / ranks))


def dropped(imbalance: float, experts: int, capacity: float) -> float:
    """Share of the routed tokens that experts with ``capacity`` times the mean load drop."""
    if imbalance == 1:
        return max(0.0, 1 - capacity)
    deviation = (imbalance - 1) / _fullest(experts)
    u = (capacity - 1) / deviation
    return max(0.0, deviation * _NORMAL.pdf(u) - (capacity - 1) * (1 - _NORMAL.cdf(u)))
