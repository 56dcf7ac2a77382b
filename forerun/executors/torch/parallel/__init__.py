"""One model shared by several processes: tensor and expert parallelism."""
