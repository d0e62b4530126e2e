"""Write the golden dumps anew: ``python -m tests.passes.regenerate_golden``, then read the diff before committing."""

from pathlib import Path

from camshaft.ir.text import diff_graphs, dump_graph
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import context, tiny_llama

FOLDER = Path(__file__).parent / "golden"


def golden_texts():
    """The tiny Llama as exported, and what each pass changed, by file name."""
    program = tiny_llama()
    before = dump_graph(program)
    texts = {"exported.txt": before}

    def observe(name, after):
        nonlocal before
        text = dump_graph(after)
        texts[f"{name}.txt"] = diff_graphs(before, text) + "\n"
        before = text

    run_passes(program, context(), observe=observe)
    texts["engine.txt"] = before
    return texts


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in golden_texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
