"""SGLang's own /generate and related routes."""
