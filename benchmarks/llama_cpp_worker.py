"""llama.cpp as a contestant of ``decode_cpu.py``, in an interpreter of its own that has ``llama_cpp``.

    python benchmarks/llama_cpp_worker.py MODEL.gguf --threads 2

A model that is not 8-bit already is rounded to Q8_0 first. ``--no-extra-buffers`` leaves weights in their own layout:
AMX, which faults on some virtual machines, is then not used. Answers each line of JSON ``{"prompt": [ids], "new": n}``
on stdin with one line ``{"first": s, "gaps": [s, ...], "tokens": [ids]}``: greedy, its cache emptied before.
"""

import argparse
import ctypes
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path


def eight_bit(model: Path, folder: Path) -> Path:
    """``model`` as Q8_0, written to ``folder``."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    target = folder / "q8_0.gguf"
    if llama_cpp.llama_model_quantize(str(model).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise SystemExit(f"llama.cpp does not quantise {model}")
    return target


def open_model(path: Path, threads: int, extra_buffers: bool) -> object:
    """The model. There is no argument for the buffers: their default is changed."""
    import llama_cpp

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def changed() -> object:
        params = defaults()
        params.use_extra_bufts = extra_buffers
        return params

    llama_cpp.llama_cpp.llama_model_default_params = changed
    return llama_cpp.Llama(str(path), n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads,
                           verbose=False)


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--no-extra-buffers", action="store_true")
    args = parser.parse_args()
    import llama_cpp

    with tempfile.TemporaryDirectory() as scratch:
        path = args.model if "q8_0" in args.model.name.lower() else eight_bit(args.model, Path(scratch))
        llm = open_model(path, args.threads, not args.no_extra_buffers)
        print(json.dumps({"version": llama_cpp.__version__, "bytes": path.stat().st_size}), flush=True)
        for line in sys.stdin:
            wanted = json.loads(line)
            llm.reset()
            stamps, tokens = [time.perf_counter()], []
            for token in llm.generate(wanted["prompt"], top_k=1, temp=0.0, reset=True):
                tokens.append(token)
                stamps.append(time.perf_counter())
                if len(tokens) == wanted["new"]:
                    break
            gaps = [after - before for before, after in itertools.pairwise(stamps)]
            print(json.dumps({"first": gaps[0], "gaps": gaps[1:], "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
