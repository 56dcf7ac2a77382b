"""A whole round as one captured CUDA graph: verify, accept, commit and the next draft."""
