"""Where peers are kept, and the error for one that is not there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
#: ignored by git, as all of ``build/``
DEFAULT = ROOT / "build" / "peers"


class MissingPeer(Exception):
    """A peer, or something made with one, is not in the cache; says which command makes it."""

    def __init__(self, peer: str, cache: Path, missing: Path) -> None:
        super().__init__(
            f"{peer} is not set up: {missing} is not there. Set it up with\n"
            f"  python benchmarks/setup_peers.py {peer} --cache {cache}"
        )
        self.peer = peer


def require(peer: str, cache: Path, path: Path) -> Path:
    """``path``, or MissingPeer if it is not there."""
    if not path.exists():
        raise MissingPeer(peer, cache, path)
    return path
