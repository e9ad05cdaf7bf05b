"""Benchmarks of daskps, for asv."""
