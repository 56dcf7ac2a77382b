"""Request bodies: what clients may send, and the conversion to engine requests."""
