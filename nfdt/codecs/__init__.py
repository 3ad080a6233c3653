"""How gradients and weights are written on the wire."""
