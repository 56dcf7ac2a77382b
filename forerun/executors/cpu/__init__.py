"""The CPU executor: the file's own quantised weights through a compiled core."""
