"""Set up the engines that ``compare.py`` compares with, each in a folder of a cache.

    python benchmarks/setup_peers.py llama.cpp kt-kernel [--cache build/peers]

What is there already is kept, so a second run does nothing, and one that was interrupted goes on.
Says what it downloads, builds and runs before it does.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peers import cache as peers_cache
from peers import kt, llama_cpp, transformers_model

_LLAMA_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF",
]  # fmt: skip
_DRIVERS = Path(llama_cpp.__file__).parent


class SetupFailed(Exception):
    """A step did not succeed; says which, and where its output is."""


def llama(cache: Path, jobs: int) -> None:
    """Download the source archive (77 MB), build its libraries natively and our drivers on them."""
    folder = cache / llama_cpp.NAME
    source = folder / "source" / "vendor" / "llama.cpp"
    if not source.exists():
        wanted = f"llama-cpp-python=={llama_cpp.ARCHIVE}"
        download = folder / "download"
        run(
            f"downloading {wanted} (source archive, 77 MB)",
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:",
             "-d", str(download), wanted],
            folder / "download.log",
        )  # fmt: skip
        unpack(next(download.glob("llama_cpp_python-*.tar.gz")), folder / "source")
    build = folder / "build"
    libraries = build / "bin"
    if not (libraries / "libllama.so").exists():
        run(
            "configuring llama.cpp for this CPU",
            ["cmake", "-S", str(source), "-B", str(build), *_LLAMA_OPTIONS],
            folder / "configure.log",
        )
        run(
            f"building its libraries with {jobs} jobs (some minutes)",
            ["cmake", "--build", str(build), "-j", str(jobs), "--target", "ggml", "llama"],
            folder / "build.log",
        )
    for name, linked in llama_cpp.DRIVERS.items():
        driver, binary = _DRIVERS / f"{name}.cpp", folder / name
        if binary.exists() and binary.stat().st_mtime > driver.stat().st_mtime:
            continue
        run(
            f"building {binary} from {driver}",
            ["c++", "-std=c++17", "-O2", "-Wall", f"-I{source / 'ggml' / 'include'}",
             f"-I{source / 'include'}", str(driver), "-o", str(binary), f"-L{libraries}",
             *(f"-l{library}" for library in linked), f"-Wl,-rpath,{libraries.resolve()}"],
            folder / f"{name}.log",
        )  # fmt: skip


def kt_kernel(cache: Path, jobs: int) -> None:
    """Install its wheel (100 MB) beside this environment, without its own copy of torch."""
    folder = cache / kt.NAME
    if not (folder / "packages" / "kt_kernel").exists():
        # Its pinned torch is gigabytes of CUDA; the CPU operator needs torch for tensors only.
        run(
            f"installing kt-kernel {kt.RELEASE} without dependencies",
            [sys.executable, "-m", "pip", "install", "--no-deps", "--target",
             str(folder / "packages"), f"kt-kernel=={kt.RELEASE}"],
            folder / "install.log",
        )  # fmt: skip
    run(
        "importing kt-kernel",
        ["env", f"PYTHONPATH={folder / 'packages'}", sys.executable, "-c",
         "import kt_kernel, kt_kernel_ext"],
        folder / "import.log",
    )  # fmt: skip


def transformers(cache: Path, jobs: int) -> None:
    """Nothing to download: the package comes with the extra ``test``."""
    if importlib.util.find_spec("transformers") is None:
        raise SetupFailed("transformers is not installed; pip install -e '.[test]'")


PEERS: dict[str, Callable[[Path, int], None]] = {
    llama_cpp.NAME: llama,
    kt.NAME: kt_kernel,
    transformers_model.NAME: transformers,
}


def run(what: str, command: Sequence[str], log: Path) -> None:
    """Run a step, its output into ``log``. Raises SetupFailed."""
    print(f"{what}\n  {' '.join(command)}", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT).returncode
    if code:
        tail = log.read_text(errors="replace")[-3000:]
        raise SetupFailed(f"{what} failed:\n{tail}\nThe whole output is in {log}")


def unpack(archive: Path, target: Path) -> None:
    """Unpack the archive's only folder as ``target``."""
    print(f"unpacking {archive}", flush=True)
    partial = target.with_name(target.name + ".partial")
    with tarfile.open(archive) as file:
        file.extractall(partial, filter="data")
    next(partial.iterdir()).rename(target)
    partial.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="+", choices=sorted(PEERS), metavar="PEER")
    parser.add_argument("--cache", type=Path, default=peers_cache.DEFAULT)
    parser.add_argument("--jobs", type=int, default=2, help="compile jobs at the same time")
    options = parser.parse_args()
    for name in options.peers:
        try:
            PEERS[name](options.cache.resolve(), options.jobs)
        except SetupFailed as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{name} is ready in {options.cache}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
