"""What the experiments under papers/ share."""
