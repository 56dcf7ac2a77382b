"""Ollama's /api/chat, /api/generate and its routes about models."""
