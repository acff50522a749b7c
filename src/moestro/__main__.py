"""``python -m moestro`` is the ``moestro`` command."""

from __future__ import annotations

from moestro.cli.main import main

if __name__ == "__main__":
    main()
