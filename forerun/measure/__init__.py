"""Load generation, the losslessness proof, and reports."""
