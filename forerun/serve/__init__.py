"""The HTTP server: the APIs of OpenAI, Anthropic, Ollama, llama.cpp and SGLang."""
