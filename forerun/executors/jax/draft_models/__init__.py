"""The DraftModel interface implemented with compiled programs."""
