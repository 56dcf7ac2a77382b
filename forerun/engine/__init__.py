"""The engine: requests, the scheduler, plans, steps, and the thread that runs them."""
