"""Anthropic's /v1/messages and its count_tokens."""
