"""The DraftModel contract on programs."""
