"""Answers: submit a request to the engine, follow it, write it in a dialect."""
