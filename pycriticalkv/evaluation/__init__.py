"""Measuring and looking at what a KV budget does to a model."""
