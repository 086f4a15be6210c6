"""``parallel-ops doctor``: what this machine has, whether its ranks reach each other, and what is wrong in words."""
