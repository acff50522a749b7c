"""Where each tensor lives and when it moves."""
