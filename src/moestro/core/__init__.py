"""Errors, environment, logging, registries and units: what every floor may use."""
