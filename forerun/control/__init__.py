"""How many draft tokens each sequence deserves, decided in one place."""
