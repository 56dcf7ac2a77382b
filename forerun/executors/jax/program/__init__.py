"""Compiled programs, and the steps that call them."""
