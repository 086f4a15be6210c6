"""How ops reach kernels: registration, autograd without the dispatcher, checks of tensors."""
