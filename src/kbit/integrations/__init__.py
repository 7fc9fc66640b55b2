"""Connections to other libraries. Nothing here is imported before the library in question is used."""
