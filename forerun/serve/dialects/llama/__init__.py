"""What llama.cpp's clients ask of its server beside OpenAI's routes."""
