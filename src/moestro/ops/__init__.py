"""What an operation means: contracts, reference implementations, dispatch."""
