"""The options: their meaning, their values, and their names here and in other servers."""
