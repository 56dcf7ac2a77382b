"""Draft networks as pure functions, and their passes."""
