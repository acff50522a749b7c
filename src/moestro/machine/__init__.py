"""Facts about this computer."""
