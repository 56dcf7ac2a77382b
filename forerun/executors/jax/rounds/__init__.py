"""Rows of a round: inputs, choices, sampling, reports."""
