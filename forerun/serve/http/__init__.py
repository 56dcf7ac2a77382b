"""HTTP independent of any dialect: connections, allowed hosts, workers, static files."""
