"""What a BLAS makes of the matrix products of one step: ``python -m loadtest.products [BLAS] [ROWS,ROWS...]``.

Times the linear layers of the embedded model (30 layers, float32) for a number of rows, each weight read once as in a
step. One BLAS a process: MLX binds to the first it finds.
"""

from __future__ import annotations

import statistics
import sys
import time

from app.engine.blas import preload

HIDDEN, KV, INNER, VOCABULARY, LAYERS = 576, 192, 1536, 49152, 30
# (outputs, inputs), and how many a layer has.
PRODUCTS = (((HIDDEN, HIDDEN), 2), ((KV, HIDDEN), 2), ((INNER, HIDDEN), 2), ((HIDDEN, INNER), 1))
ROUNDS = 5


def main(blas: str, levels: list[int]) -> None:
    report = preload(blas, "auto")
    import mlx.core as mx

    print(f"{report.path} ({report.version}), {report.threads} threads")
    weights = [mx.random.normal(shape) for _ in range(LAYERS) for shape, count in PRODUCTS for _ in range(count)]
    weights.append(mx.random.normal((VOCABULARY, HIDDEN)))
    mx.eval(weights)
    for level in levels:
        inputs = {width: mx.random.normal((level, width)) for width in (HIDDEN, INNER)}
        mx.eval(list(inputs.values()))
        seconds = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            mx.eval([inputs[weight.shape[1]] @ weight.T for weight in weights])
            seconds.append(time.perf_counter() - began_s)
        print(f"{level:4} rows {statistics.median(seconds) * 1000:8.1f} ms")


if __name__ == "__main__":
    names = sys.argv[1:2] or ["auto"]
    main(names[0], [int(text) for text in (sys.argv[2:3] or ["1,2,4,8,16,80,320"])[0].split(",")])
