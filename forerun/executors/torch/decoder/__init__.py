"""The target's network: layers, experts, weights. Independent of how attention is computed."""
