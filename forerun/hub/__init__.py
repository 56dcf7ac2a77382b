"""Finding a model's files by its reference: built-in names, hub ids, wheels, the local cache."""
