"""Tokenizer, incremental detokenising, chat templates."""
