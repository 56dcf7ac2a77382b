"""The target's network: layers, experts, weights; how rows see each other is not known here."""
