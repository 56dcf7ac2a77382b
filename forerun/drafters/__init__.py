"""What proposes continuations."""
