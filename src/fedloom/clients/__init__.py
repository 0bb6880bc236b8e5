"""Work of the clients: the training loop, one training step, sweeps, and the layout of tensors."""
