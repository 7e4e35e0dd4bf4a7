"""Utilities of all parts: files, messages, plain data."""
