"""Draft networks, and the draft models that run them beside the target."""
