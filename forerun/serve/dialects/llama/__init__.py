"""Routes of llama.cpp's server that OpenAI does not have."""
