"""Write the golden dumps anew: ``python -m tests.passes.regenerate_golden``, then read the diff before committing."""

from pathlib import Path

from camshaft.ir.text import diff_graphs, dump_graph
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import context, tiny_llama

FOLDER = Path(__file__).parent / "golden"


def golden_texts():
    """The tiny Llama as exported, and what each pass changed (where it is asked for, when asked), by file name."""
    texts = _changes(tiny_llama())
    for name, build in (("quantize", {"quantization": "w8a8"}), ("narrow_weights", {"weight_dtype": "bfloat16"}),
                        ("narrow_attention", {"max_attention_window": 8, "sink_tokens": 2})):
        texts[f"{name}.txt"] = _changes(tiny_llama(tied=True), **build)[f"{name}.txt"]
    return texts


def _changes(program, **build):
    before = dump_graph(program)
    texts = {"exported.txt": before}

    def observe(name, after):
        nonlocal before
        text = dump_graph(after)
        texts[f"{name}.txt"] = diff_graphs(before, text) + "\n"
        before = text

    run_passes(program, context(**build), observe=observe)
    texts["engine.txt"] = before
    return texts


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in golden_texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
