"""Request bodies: what clients may send, and the engine request that becomes of it."""
