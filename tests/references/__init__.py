"""Reference implementations that fast paths are compared with. forerun/ imports none of them."""
