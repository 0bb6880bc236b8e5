"""What happens at a client: THE local loop, one training step, one sweep, and how clients are laid out."""
