"""Hand-made step plans for runtime tests: one full life cycle, pages named by the test."""

import numpy as np

from camshaft.runtime.step import PageUpdates, RowArrival, RowSampling, StepPlan


def ints(*values):
    return np.array(values, dtype=np.int32)


def sampling(*, temperature=0.0, seed=0, min_tokens=0, suppressed=(), **changes):
    base = dict(top_k=0, top_p=1.0, min_p=0.0, choice=0)
    return RowSampling(temperature=temperature, seed=seed, min_tokens=min_tokens,
                       suppressed_token_ids=ints(*suppressed), **{**base, **changes})


def arrival(row, epoch=0, *, prompt=(), output=(), **options):
    return RowArrival(row=row, epoch=epoch, sampling=sampling(**options), history=ints(*prompt, *output),
                      num_prompt_tokens=len(prompt))


def plan(step, *, generation=(), context=(), arrivals=(), pages=(), copies=(), epochs=None, scores=None):
    """``generation``: (row, start, output index); ``context``: (row, start, tokens, output index or None);
    ``pages``: (row, column, page); ``copies``: (from, to); ``scores``: row to the targets of its first fed tokens."""
    rows = [entry[0] for entry in generation] + [entry[0] for entry in context]
    starts = [entry[1] for entry in (*generation, *context)]
    lens = [1] * len(generation) + [len(entry[2]) for entry in context]
    outputs = [entry[2] for entry in generation] + [entry[3] for entry in context]
    tokens = [token for entry in context for token in entry[2]]
    updates = PageUpdates(rows=ints(*(p[0] for p in pages)), columns=ints(*(p[1] for p in pages)),
                          pages=ints(*(p[2] for p in pages)), copy_from=ints(*(c[0] for c in copies)),
                          copy_to=ints(*(c[1] for c in copies)))
    return StepPlan(step=step, arrivals=tuple(arrivals), page_updates=(updates,), rows=ints(*rows),
                    epochs=ints(*([0] * len(rows) if epochs is None else epochs)), num_generation=len(generation),
                    query_lens=ints(*lens), start_positions=ints(*starts), context_token_ids=ints(*tokens),
                    samples=np.array([index is not None for index in outputs], dtype=np.bool_),
                    output_indices=ints(*(index or 0 for index in outputs)),
                    score_lens=None if scores is None else ints(*(len(scores.get(row, ())) for row in rows)),
                    score_targets=None if scores is None else ints(*(t for row in rows for t in scores.get(row, ()))))
