"""The native core as Python sees it: the chosen instruction set and the thread team.

Importing this module picks the best kernel table the CPU supports, or the one ``MOESTRO_ISA`` names
(an UnsupportedOp error if the machine lacks it), and sets the team to ``MOESTRO_THREADS`` if given.
"""

from __future__ import annotations

from collections.abc import Sequence

import moestro._core as core
from moestro.core import env

# What the system calls each NUMA node of the team.
_node_numbers: list[int] = [0]


def set_threads(threads: int) -> None:
    """A team of this many threads that may run anywhere, all on one node. InvalidRequest outside
    1..1024.
    """
    core.set_threads(threads)
    _node_numbers[:] = [0]


def set_team(
    nodes: Sequence[int], cpus: Sequence[Sequence[int]], node_numbers: Sequence[int]
) -> str:
    """A team with one thread per entry: its node (0.. ascending), and the logical CPUs it is kept
    on (none: any). ``node_numbers``: what the system calls each node. Returns why threads could not
    be kept on their CPUs, empty if they are.
    """
    core.set_team(list(nodes), [list(own) for own in cpus])
    _node_numbers[:] = node_numbers
    problem: str = core.placement_problem()
    return problem


def node_numbers() -> tuple[int, ...]:
    """What the system calls each node of the team; virtual nodes may share a number."""
    return tuple(_node_numbers)


_forced = env.isa()
if _forced is not None:
    core.set_isa(_forced)
_threads = env.threads()
if _threads is not None:
    set_threads(_threads)

isa = core.isa
set_isa = core.set_isa
supported_isas = core.supported_isas
built_isas = core.built_isas
emulated_isas = core.emulated_isas
same_bits = core.same_bits
set_same_bits = core.set_same_bits
folds = core.folds
threads = core.threads
node_slices = core.node_slices
Program = core.Program
allocate_bytes = core.allocate_bytes
BlockReader = core.BlockReader
ExpertCache = core.ExpertCache
cache_policies = core.cache_policies
uring_refusal = core.uring_refusal
probe_read = core.probe_read
probe_dot = core.probe_dot
probe_fma = core.probe_fma
probe_bf16 = core.probe_bf16
