"""Anthropic's /v1/messages and its counting of tokens."""
