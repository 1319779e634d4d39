"""Measures what the package promises, as ratios within one run."""
