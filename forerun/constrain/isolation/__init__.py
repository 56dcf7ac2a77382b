"""Processes that can be killed: strangers' grammars are compiled there, expensive ones followed."""
