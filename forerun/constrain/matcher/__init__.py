"""One sequence under a grammar: what may follow at every node of a draft tree."""
