"""Text: tokenizers, incremental detokenizing, chat templates, parsers of reasoning and tool
calls.
"""
