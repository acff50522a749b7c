"""Other engines, set up by ``setup_peers.py`` in a cache folder, run in processes of their own."""
