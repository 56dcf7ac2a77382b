"""Policies: how many draft tokens each sequence gets in a step."""
