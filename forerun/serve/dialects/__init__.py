"""Dialects: the APIs of other servers, one folder each, behind one contract."""
