"""HTTP without any dialect: connections, bytes, hosts, workers, static files."""
