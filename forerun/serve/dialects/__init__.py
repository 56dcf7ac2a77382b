"""Dialects: the APIs of other servers, one folder each, with one interface."""
