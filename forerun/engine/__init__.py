"""The engine owns time: requests, plans, the scheduler, the loop."""
