"""A model as it was built, and tensors in nested containers."""
