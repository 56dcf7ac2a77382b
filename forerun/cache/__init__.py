"""Page bookkeeping: pages, reference counts, prefix index, page tables. No arrays."""
