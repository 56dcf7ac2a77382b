"""GGUF files, by llama.cpp's names."""
