"""JSON schemas, rewritten into the keywords that llguidance enforces."""
