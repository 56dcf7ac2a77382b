"""Slow twins: what fast paths of the product are held to. Nothing in forerun/ imports them."""
