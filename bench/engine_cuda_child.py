"""One checkout's CUDA benchmark in a process of its own, for `bench/engine.py --device cuda --against`.

Imports the checkout's own bench/engine_cuda.py and engine and makes the model once. Each line of stdin names
a measure, of which one round is run; answers are JSON lines. Two of these processes take turns on one GPU.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path


def main() -> None:
    tree, shape = Path(sys.argv[1]).resolve(), sys.argv[2]
    sys.path[:1] = [str(tree / "bench"), str(tree / "src")]  # in place of this file's own folder
    out, sys.stdout = sys.stdout, sys.stderr

    import engine_cuda
    import torch

    bench = engine_cuda.Bench(shape, 1, engine_cuda.random_decoder(shape), {})
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        value = engine_cuda.MEASURES[line.strip()](bench)
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps({"value": value}), file=out, flush=True)


if __name__ == "__main__":
    main()
