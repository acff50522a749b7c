"""kt-kernel's MoE operator over the weights of a case folder; imports nothing of this project.

    kt_worker.py METHOD CASE THREADS LAYERS

Each line on standard input is answered by a line of JSON:

    run TOKENS CALLS IDS      IDS: int32 [CALLS, LAYERS, TOKENS, TOP_K] -> seconds of each call
    check TOKENS X IDS W OUT  float32 [TOKENS, HIDDEN], ids and weights [TOKENS, TOP_K]; layer 0

A call is one pass over all layers. Inputs and outputs are bfloat16, as the operator takes them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kt_kernel
import kt_kernel_ext as extension
import numpy as np
import torch
from torch import Tensor

PARTS = ("gate", "up", "down")
MAX_TOKENS = 1024
#: ggml's number of the only block type that is handed to LLAMAFILE, and of bfloat16
Q4_K, BF16 = 12, 30

CLASSES = {
    "RAWINT4": "AMXInt4_KGroup_MOE",
    "MXFP4": "AMXFP4_KGroup_MOE",
    "FP8": "AMXFP8_MOE",
    "BF16": "AMXBF16_MOE",
    "AMXINT8": "AMXInt8_MOE",
    "LLAMAFILE": "MOE",
}
#: (bits, channels per scale) of methods that read codes with scales
GROUPED = {"RAWINT4": (4, 32), "MXFP4": (4, 32), "FP8": (8, 128)}


class Operator:
    """One operator object per layer, all over the same experts, copied by kt-kernel."""

    def __init__(self, method: str, case: Path, threads: int, layers: int) -> None:
        self.method, self.case = method, case
        self.facts = json.loads((case / "case.json").read_text())
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [threads]
        self.cpu = extension.CPUInfer(pool)
        self.no_gpu = torch.zeros(self.facts["experts"], dtype=torch.bool)
        self.kept: list[Tensor] = []
        physical = torch.arange(self.facts["experts"], dtype=torch.int64)
        make = getattr(extension.moe, CLASSES[method])
        self.layers = []
        for index in range(layers):
            layer = make(self._config(index))
            self.cpu.submit(layer.load_weights_task(physical.data_ptr()))
            self.cpu.sync()
            self.layers.append(layer)
        if method != "LLAMAFILE":  # which goes on reading these bytes
            self.kept.clear()

    def _config(self, index: int) -> Any:
        facts = self.facts
        sizes = [facts[key] for key in ("experts", "top_k", "hidden", "intermediate")]
        config = extension.moe.MOEConfig(*sizes, self.no_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = index, self.cpu.backend_, MAX_TOKENS
        if self.method == "LLAMAFILE":
            self._point_at_blocks(config)
        elif self.method == "AMXINT8":
            config.load = config.save = False
            for part in PARTS:
                setattr(config, f"{part}_proj", self._stacked(part).data_ptr())
        else:
            self._point_at_experts(config)
        return config

    def _point_at_blocks(self, config: Any) -> None:
        config.m_block, config.group_min_len, config.group_max_len = 32, 10, MAX_TOKENS
        for part in PARTS:
            setattr(config, f"{part}_proj", self._stacked(part).data_ptr())
            setattr(config, f"{part}_type", Q4_K)
        config.hidden_type = BF16

    def _point_at_experts(self, config: Any) -> None:
        for part in PARTS:
            setattr(config, f"{part}_projs", [self._pointers(f"{part}.kt")])
            scales = f"{part}.kt_scales"
            grouped = (self.case / scales).exists()
            pointers = self._pointers(scales) if grouped else [0] * self.facts["experts"]
            setattr(config, f"{part}_scales", [pointers])
        if self.method in GROUPED:
            config.quant_config.bits, config.quant_config.group_size = GROUPED[self.method]
            config.quant_config.zero_point = False

    def _bytes(self, name: str) -> Tensor:
        data = torch.from_numpy(np.fromfile(self.case / name, np.uint8))
        self.kept.append(data)
        return data.view(self.facts["distinct"], -1)

    def _pointers(self, name: str) -> list[int]:
        """Where each expert's bytes are; expert e is number e % distinct."""
        rows = self._bytes(name)
        return [rows[e % len(rows)].data_ptr() for e in range(self.facts["experts"])]

    def _stacked(self, part: str) -> Tensor:
        rows = self._bytes(f"{part}.kt")
        stacked = rows.repeat(-(-self.facts["experts"] // len(rows)), 1)[: self.facts["experts"]]
        self.kept.append(stacked)
        return stacked

    def forward(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        count = torch.tensor([len(x)], dtype=torch.int32)
        task = self.layers[layer].forward_task(
            count.data_ptr(), ids.shape[1], ids.data_ptr(), weights.data_ptr(), x.data_ptr(),
            out.data_ptr(), False,
        )  # fmt: skip
        self.cpu.submit(task)
        self.cpu.sync()

    def run(self, words: list[str]) -> dict[str, Any]:
        tokens, calls, path = int(words[0]), int(words[1]), words[2]
        top_k = self.facts["top_k"]
        ids = torch.from_numpy(np.fromfile(path, np.int32).astype(np.int64))
        ids = ids.view(calls, len(self.layers), tokens, top_k)
        weights = torch.full((tokens, top_k), 1 / top_k)
        x = torch.randn(tokens, self.facts["hidden"]).bfloat16()
        out = torch.empty_like(x)
        seconds = []
        for call in ids:
            start = time.perf_counter()
            for layer in range(len(self.layers)):
                self.forward(layer, x, call[layer], weights, out)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def check(self, words: list[str]) -> dict[str, Any]:
        tokens = int(words[0])
        x = torch.from_numpy(np.fromfile(words[1], np.float32)).view(tokens, -1).bfloat16()
        ids = torch.from_numpy(np.fromfile(words[2], np.int32).astype(np.int64)).view(tokens, -1)
        weights = torch.from_numpy(np.fromfile(words[3], np.float32)).view(tokens, -1)
        out = torch.zeros_like(x)
        self.forward(0, x, ids, weights, out)
        out.float().numpy().tofile(words[4])
        return {"done": True}


def main() -> None:
    # The library writes to standard output too: give it standard error, and keep the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    method, case, threads, layers = sys.argv[1:]
    operator = Operator(method, Path(case), int(threads), int(layers))
    actions: dict[str, Callable[[list[str]], dict[str, Any]]] = {
        "run": operator.run,
        "check": operator.check,
    }
    print(json.dumps({"version": kt_kernel.__version__, "how": method}), file=answers, flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        print(json.dumps(actions[what](words)), file=answers, flush=True)
    os._exit(0)  # its worker threads do not end on their own


if __name__ == "__main__":
    main()
