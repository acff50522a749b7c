"""What the families share, so that each family's file holds only what is its own."""
