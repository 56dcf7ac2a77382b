"""Every option: what it is, what it may be, and what it is called here and by other servers."""
