"""What a checkpoint is, in no framework."""
