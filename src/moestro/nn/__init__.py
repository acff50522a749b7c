"""Layers, blind to where their weights are."""
