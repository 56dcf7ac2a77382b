"""Training draft heads."""
