"""An executor for the PTX that Triton makes: what a GPU would run, run by NumPy on tensors of the CPU.

All threads of a launch are lanes of NumPy arrays. ``execution.executed`` makes launchers run here as they are:

    with executed(90) as reports:
        kernels.forward(x, bias, y)

``program`` reads PTX, ``machine`` runs it, ``arithmetic``, ``transfers`` and ``matrix`` know the instructions,
``global_memory`` and ``shared_memory`` hold the data and find accesses that a GPU would not forgive, ``report`` counts.
"""
