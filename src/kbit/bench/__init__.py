"""Benchmarks: one timing protocol, what the machine is, and the tables that `kbit bench` prints."""
