"""Keys and values in pages, who sees whom, and attention in plain torch."""
