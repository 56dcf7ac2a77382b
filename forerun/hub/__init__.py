"""Model references resolved to files: built-in names, hub ids, wheels, the local cache."""
