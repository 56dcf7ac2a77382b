"""OpenAI's /v1/responses: items in, items out, and conversations that the server remembers."""
