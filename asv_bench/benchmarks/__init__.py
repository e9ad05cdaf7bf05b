"""Benchmarks of daskps, for asv.

DASKPS_BENCH_PROFILE=fast, the default, sees that everything runs and shows large changes in minutes;
regular is for figures to keep, takes longer, and wants a machine that does nothing else.
"""
