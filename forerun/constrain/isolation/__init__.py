"""Processes that can be killed: clients' grammars are compiled there, and expensive ones are
matched there.
"""
