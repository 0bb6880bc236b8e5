"""Files: atomic writes, nested tensors, client states, checkpoints. It knows no run."""
