"""What operators read: logs, metrics, traces."""
