"""SGLang's own /generate, and what its clients ask beside it."""
