"""Speeds that kernels should reach on GPUs that need not be there: bytes, instructions, occupancy and waves, no timing.

``facts`` runs the ops on tensors without memory, their PTX in the executor of the tests: a sample of the programs of
each launch, at the real size. ``devices`` has what a GPU offers, ``prediction`` puts the two together, ``table``
prints.
"""
