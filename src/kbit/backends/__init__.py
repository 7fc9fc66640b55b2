"""Implementations of the ops, one package per kind of machine."""
