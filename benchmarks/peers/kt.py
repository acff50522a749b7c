"""kt-kernel: its MoE operator in a process of its own (``kt_worker.py``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peers import cache as peers_cache
from peers.worker import Worker

NAME = "kt-kernel"
RELEASE = "0.7.2"

_SCRIPT = Path(__file__).with_name("kt_worker.py")


class KtKernel:
    """The packages in a cache folder."""

    version = f"{NAME} {RELEASE}"

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.folder = cache / NAME
        self.packages = self.folder / "packages"

    def require(self) -> None:
        """Raises MissingPeer unless it is set up."""
        peers_cache.require(NAME, self.cache, self.packages / "kt_kernel")

    def start_operator(self, case: Path, *, threads: int, layers: int) -> Worker:
        """The operator over the weights of a case folder (see ``comparing.weights``), by the method
        that the case names, with ``threads`` workers.
        """
        facts = json.loads((case / "case.json").read_text())
        environment = {
            "PYTHONPATH": str(self.packages),
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, str(_SCRIPT), facts["kt_method"], str(case)]
        log = self.folder / "logs" / f"{case.name}.log"
        words = [*command, str(threads), str(layers)]
        return Worker(words, environment=environment, log=log)
