"""Keys and values in pages, attention masks of trees, and attention in torch operations."""
