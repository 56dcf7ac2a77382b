"""Draft networks, and the draft models that run them with the target."""
