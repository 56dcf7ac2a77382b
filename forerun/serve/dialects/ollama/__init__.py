"""Ollama's /api/chat, /api/generate and what tells of the model."""
