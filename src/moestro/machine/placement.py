"""Where compute threads belong: how many, on which NUMA node, on which CPUs. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestro.core.errors import InvalidRequest
from moestro.machine.facts import MachineFacts

#: ``core``: each thread is kept on a core of its own. ``node``: on the cores of its node. ``none``:
#: anywhere. ``auto``: ``core`` if the team has all usable cores, so that no other process can have
#: chosen the same ones; else ``node`` if there are several; else ``none``.
PINS = ("auto", "core", "node", "none")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A team. pin: what was chosen (never ``auto``). nodes: of each thread, 0.. ascending. cpus: of
    each thread, where it is kept; empty: anywhere. node_numbers: what the kernel calls each node.
    The first thread is the caller's: it is moved to its CPUs, not kept there.
    """

    pin: str
    nodes: tuple[int, ...]
    cpus: tuple[tuple[int, ...], ...]
    node_numbers: tuple[int, ...]

    @property
    def threads(self) -> int:
        return len(self.nodes)


def place(
    machine: MachineFacts,
    *,
    threads: int | None = None,
    pin: str = "auto",
    numa_nodes: int | None = None,
) -> Placement:
    """Place a team of ``threads`` (default: ``machine.threads``) on ``numa_nodes`` nodes.

    The default is the nodes this process may use. Another number makes virtual nodes: 1 turns
    slicing off, more than there are split the real ones, as tests do. Never more than threads.
    Raises InvalidRequest for ``core`` with more threads than cores, and for unknown names.
    """
    if pin not in PINS:
        raise InvalidRequest(f"pin must be one of {', '.join(PINS)}, got {pin!r}")
    threads = machine.threads if threads is None else threads
    by_node = _cores_by_node(machine)
    count = min(threads, len(by_node) if numa_nodes is None else numa_nodes)
    if threads < 1 or count < 1:
        raise InvalidRequest(f"threads and numa_nodes must be positive, got {threads}, {count}")
    chosen = _choose(machine, pin, threads, len(by_node))
    cores = sum(len(own) for _, own in by_node)
    if chosen == "core" and threads > cores:
        raise InvalidRequest(
            f"pin=core needs a core for each of {threads} threads, but this process may use "
            f"{cores}; use fewer threads or pin=none"
        )
    real = _shares(threads, [len(own) for _, own in by_node])
    where = [i for i, share in enumerate(real) for _ in range(share)]  # real node of each thread
    if count == sum(share > 0 for share in real) and numa_nodes in (None, len(by_node)):
        used = sorted(set(where))
        nodes = [used.index(i) for i in where]
    else:
        nodes = [n for n, share in enumerate(_shares(threads, [1] * count)) for _ in range(share)]
    return Placement(
        pin=chosen,
        nodes=tuple(nodes),
        cpus=tuple(_cpus(chosen, by_node, where)),
        node_numbers=tuple(by_node[where[nodes.index(n)]][0] for n in range(count)),
    )


Cores = Sequence[tuple[int, ...]]


def _choose(machine: MachineFacts, pin: str, threads: int, nodes: int) -> str:
    if pin != "auto":
        return pin
    # A quota below the cores means that the scheduler has to find idle ones among them.
    if threads == machine.physical_cores == machine.threads:
        return "core"
    return "node" if nodes > 1 else "none"


def _cores_by_node(machine: MachineFacts) -> list[tuple[int, Cores]]:
    """(the kernel's number, cores) of each node this process may use."""
    found: list[tuple[int, Cores]] = []
    for node in machine.numa_nodes:
        own = [core for core in machine.cores if core[0] in node.cpus]
        if own:
            found.append((node.number, tuple(own)))
    return found or [(0, machine.cores)]


def _shares(threads: int, weights: Sequence[int]) -> list[int]:
    """Threads in proportion to the weights, the largest remainders rounded up."""
    total = sum(weights)
    shares = [threads * weight // total for weight in weights]
    left = sorted(range(len(weights)), key=lambda i: (-(threads * weights[i] % total), i))
    for i in left[: threads - sum(shares)]:
        shares[i] += 1
    return shares


def _cpus(
    pin: str, by_node: Sequence[tuple[int, Cores]], where: Sequence[int]
) -> list[tuple[int, ...]]:
    placed: list[tuple[int, ...]] = []
    for thread, node in enumerate(where):
        cores = by_node[node][1]
        if pin == "core":
            placed.append(tuple(cores[where[:thread].count(node)]))
        elif pin == "node":
            placed.append(tuple(sorted(cpu for core in cores for cpu in core)))
        else:
            placed.append(())
    return placed
