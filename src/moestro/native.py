"""The native core as Python sees it: the chosen instruction set and the thread team.

Importing this module picks the best kernel table the CPU supports, or the one ``MOESTRO_ISA`` names
(an UnsupportedOp error if the machine lacks it), and sets the team to ``MOESTRO_THREADS`` if given.
"""

from __future__ import annotations

import moestro._core as core
from moestro.core import env

_forced = env.isa()
if _forced is not None:
    core.set_isa(_forced)
_threads = env.threads()
if _threads is not None:
    core.set_threads(_threads)

isa = core.isa
set_isa = core.set_isa
supported_isas = core.supported_isas
built_isas = core.built_isas
emulated_isas = core.emulated_isas
set_threads = core.set_threads
threads = core.threads
Program = core.Program
allocate_bytes = core.allocate_bytes
probe_read = core.probe_read
probe_dot = core.probe_dot
probe_fma = core.probe_fma
probe_bf16 = core.probe_bf16
