"""llama.cpp: whole models, its quantizer, and its MoE operator on ggml, each in our own driver.

Everything comes from one native build of the source that the ``llama-cpp-python`` archive carries.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peers import cache as peers_cache
from peers.worker import PeerFailed, Worker

NAME = "llama.cpp"
#: release of the source archive
ARCHIVE = "0.3.36"
#: drivers beside this file, with the libraries that each is linked with
DRIVERS = {
    "ggml_moe": ("ggml", "ggml-cpu", "ggml-base"),
    "llama_model": ("llama", "ggml", "ggml-cpu", "ggml-base"),
}

#: ggml's numbers of the types that are compared (``enum ggml_type``), with values and bytes a block
TYPES = {
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
#: llama.cpp's numbers of file types (``enum llama_ftype``)
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}


class LlamaCpp:
    """The build in a cache folder. Raises MissingPeer where a part is not there."""

    version = f"llama-cpp-python {ARCHIVE}"

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.folder = cache / NAME
        self.libraries = self.folder / "build" / "bin"

    def require(self) -> None:
        """Raises MissingPeer unless all of it is set up."""
        for driver in DRIVERS:
            self.driver(driver)

    def driver(self, name: str) -> Path:
        return peers_cache.require(NAME, self.cache, self.folder / name)

    def quantize(self, source: Path, target: Path, file_type: str, threads: int) -> None:
        """Quantize a GGUF file with llama.cpp's quantizer."""
        number = FILE_TYPES[file_type]
        command = [str(self.driver("llama_model")), "quantize", str(source), str(target)]
        done = subprocess.run([*command, str(number), str(threads)], capture_output=True, text=True)
        if done.returncode:
            raise PeerFailed(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr}")

    def quantize_rows(self, values: npt.NDArray[np.float32], type_name: str) -> npt.NDArray[Any]:
        """Quantize float32 [..., K] to ggml's blocks -> uint8 [..., bytes per row]."""
        number, per_block, block_nbytes = TYPES[type_name]
        rows, cols = values.size // values.shape[-1], values.shape[-1]
        out = np.empty((*values.shape[:-1], cols // per_block * block_nbytes), np.uint8)
        path = peers_cache.require(NAME, self.cache, self.libraries / "libggml-base.so")
        chunk = ctypes.CDLL(str(path)).ggml_quantize_chunk
        chunk.restype = ctypes.c_size_t
        chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]  # fmt: skip
        source = np.ascontiguousarray(values)
        written = chunk(number, source.ctypes.data, out.ctypes.data, 0, rows, cols, None)
        if written != out.nbytes:
            raise PeerFailed(f"ggml wrote {written} bytes of {type_name}, expected {out.nbytes}")
        return out

    def start_operator(self, case: Path, *, threads: int, layers: int, repack: bool) -> Worker:
        """The MoE operator over the weights of a case folder (see ``comparing.weights``).

        repack: let ggml rearrange the weights, as llama.cpp does, if it can with their type.
        """
        facts = json.loads((case / "case.json").read_text())
        sizes = [facts[key] for key in ("hidden", "intermediate", "experts", "top_k", "distinct")]
        command = [
            str(self.driver("ggml_moe")), str(case), str(TYPES[facts["ggml_type"]][0]),
            *(str(size) for size in sizes), str(layers), str(threads), str(int(repack)),
        ]  # fmt: skip
        return Worker(command, environment={}, log=self.folder / "logs" / f"{case.name}.log")

    def start_model(self, model: Path, *, threads: int, context: int) -> Worker:
        """A whole model, kept loaded."""
        command = [str(self.driver("llama_model")), str(model), str(threads), str(context)]
        return Worker(command, environment={}, log=self.folder / "logs" / f"{model.stem}.log")
