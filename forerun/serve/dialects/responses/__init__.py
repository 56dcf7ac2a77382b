"""OpenAI's /v1/responses: a list of items in, items out, and conversations that the server
stores.
"""
