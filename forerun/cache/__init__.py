"""Bookkeeping of the key/value cache: pages, reference counts, prefix index, page tables, pages on
disk. The arrays belong to the executor.
"""
