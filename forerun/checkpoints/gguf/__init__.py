"""Reads GGUF files, with llama.cpp's names."""
