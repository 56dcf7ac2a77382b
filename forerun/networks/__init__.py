"""Networks as data: the architecture of a model, and how config.json describes it."""
