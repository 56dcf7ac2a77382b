"""Networks as data: what a model is, and how config.json says so."""
