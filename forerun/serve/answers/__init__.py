"""Answers: submit a request to the engine, read its deltas, write them in a dialect's format."""
