"""The target model as pure functions."""
