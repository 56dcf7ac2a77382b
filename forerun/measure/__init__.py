"""Load generation, losslessness proof, reports."""
