"""Decides how many draft tokens each sequence gets, in one place."""
