"""Random combinations of sampling options against a slow reimplementation over transformers' logits; streams against
what a call returns at once."""

import codecs
import functools
import random

import numpy as np
import pytest
import torch

from camshaft import LLM, SamplingParams
from camshaft.kernels.sampling.philox import uniforms

NUM_CASES = 16
V = 320


@pytest.fixture(scope="module", params=["plenty", "preempting"])
def llm(tiny_engine, request):
    options = {"kv_cache": {"max_bytes": 2**24}} if request.param == "plenty" else {
        "kv_cache": {"max_bytes": 2**16 + 2**13},
        "scheduler": {"capacity_policy": "max_utilization", "context_chunk_tokens": 16}}
    with LLM(tiny_engine, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(tiny_llama):
    """``logits(ids) -> [T, V]`` of transformers' model, float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    @functools.cache
    def of(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].double().numpy()

    return lambda ids: of(tuple(ids))


def nudge(token_ids, logits):
    """A processor that depends on every token so far."""
    return logits.index_fill(0, torch.tensor([sum(token_ids) % V]), 9.0)


def draw(rng, words):
    """Options of one request; each is there or not."""
    some = {
        "min_tokens": rng.randint(1, 6), "repetition_penalty": rng.choice((0.8, 1.3, 2.0)),
        "presence_penalty": rng.choice((-1.0, 0.5, 2.0)), "frequency_penalty": rng.choice((-0.3, 0.4, 1.0)),
        "no_repeat_ngram_size": rng.choice((1, 2, 3)), "bad": rng.sample(words, 2),
        "bad_token_ids": rng.sample(range(V), 20),
        "logit_bias": {rng.randrange(V): rng.uniform(-6, 6) for _ in range(5)},
        "allowed_token_ids": rng.sample(range(V), 120), "logprobs": rng.choice((0, 1, 5)),
        "prompt_logprobs": rng.choice((0, 2)), "logits_processor": nudge, "stop": rng.sample(words, 3),
        "stop_token_ids": rng.sample(range(V), 12), "include_stop_str_in_output": True, "skip_special_tokens": False,
        "ignore_eos": True, "top_k": rng.choice((1, 5, 50)), "top_p": rng.choice((0.3, 0.9)),
        "min_p": rng.choice((0.05, 0.3)), "n": rng.choice((2, 3))}
    options = {name: value for name, value in some.items() if rng.random() < 0.3}
    options |= {"max_tokens": rng.randint(6, 24), "seed": rng.randrange(2**64),
                "temperature": rng.choice((0.0, 0.7, 1.5))}
    if options["temperature"] and rng.random() < 0.2:
        options["best_of"] = options.get("n", 1) + 1
    return options


class Plain:
    """One sequence, token by token, every option spelt out."""

    def __init__(self, llm, logits, prompt, options, choice):
        self.tokenizer, self.logits, self.prompt, self.choice = llm.tokenizer, logits, prompt, choice
        self.options = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
                        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": {}, "stop": (), "stop_token_ids": (),
                        **options}
        self.ends = set(self.options["stop_token_ids"]) | (set() if options.get("ignore_eos") else {0})
        self.output, self.logprobs, self.margin = [], [], np.inf

    def edited(self, found):
        options, history = self.options, self.prompt + self.output
        for token, bias in options["logit_bias"].items():
            found[token] += bias
        if "allowed_token_ids" in options:
            kept = options["allowed_token_ids"]
            found[[token for token in range(V) if token not in set(kept)]] = -np.inf
        factor = options["repetition_penalty"]
        for token in set(history):
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        for token in set(self.output):
            found[token] -= options["presence_penalty"] + options["frequency_penalty"] * self.output.count(token)
        for word in self.bad_words():
            if history[len(history) - len(word) + 1:] == word[:-1]:
                found[word[-1]] = -np.inf
        size = options.get("no_repeat_ngram_size", 0)
        for start in range(len(history) - size + 1 if size else 0):
            if history[start:start + size - 1] == history[len(history) - size + 1:]:
                found[history[start + size - 1]] = -np.inf
        if len(self.output) < options["min_tokens"]:
            found[list(self.ends)] = -np.inf
        if "logits_processor" in options:
            found = nudge(history, torch.tensor(found)).numpy()
        return found

    def bad_words(self):
        encode = self.tokenizer.encode
        words = [[token] for token in self.options.get("bad_token_ids", ())]
        for text in self.options.get("bad", ()):
            words += [encode(text.strip()), encode(" " + text.strip())]
        return words

    def pick(self, found):
        """The token, by the sampler's documented order; ``margin`` is how close the choice was."""
        temperature = self.options["temperature"]
        order = np.lexsort((np.arange(V), -found))
        if temperature == 0.0:
            self.margin = min(self.margin, found[order[0]] - found[order[1]])
            return int(order[0])
        scaled = found[order] / temperature
        weights = np.exp(scaled - scaled[0])
        kept = np.where(np.arange(V) < (self.options["top_k"] or V), weights, 0.0)
        before, nucleus = np.cumsum(kept) - kept, self.options["top_p"] * kept.sum()
        if self.options["top_p"] < 1:
            self.margin = min(self.margin, np.abs(before - nucleus).min())
            kept = np.where(before < nucleus, kept, 0.0)
        if self.options["min_p"]:
            self.margin = min(self.margin, np.abs(weights - self.options["min_p"]).min())
            kept = np.where(weights >= self.options["min_p"], kept, 0.0)
        drawn = float(uniforms(np.array([self.options["seed"]], np.uint64), np.array([self.choice], np.int32),
                               np.array([len(self.output)], np.int32))[0])
        total = np.cumsum(kept) / kept.sum()
        self.margin = min(self.margin, np.abs(total - drawn).min())
        return int(order[int(np.searchsorted(total, drawn, side="right"))])

    def run(self):
        """(token ids, text, finish reason, stop reason, log-probabilities of the tokens)."""
        for _ in range(self.options["max_tokens"]):
            raw = self.logits(self.prompt + self.output)[-1]
            token = self.pick(self.edited(raw.copy()))
            self.output.append(token)
            self.logprobs.append(raw[token] - np.log(np.exp(raw - raw.max()).sum()) - raw.max())
            text, stop = self.text()
            if token in self.ends and len(self.output) > self.options["min_tokens"]:
                return self.output, self.text(is_end=True)[0], "stop", (
                    token if token in self.options["stop_token_ids"] else None), self.logprobs
            if stop is not None:
                return self.output, text, "stop", stop, self.logprobs
        return self.output, self.text(is_final=True)[0], "length", None, self.logprobs

    def text(self, *, is_end=False, is_final=False):
        shown = self.output[:-1] if is_end and not self.options.get("include_stop_str_in_output") else self.output
        special = set() if self.options.get("skip_special_tokens") is False else self.tokenizer.special_ids
        decoder, text = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
        for place, token in enumerate(shown):
            piece = decoder.decode(b"" if token in special else self.tokenizer.token_bytes(token))
            for char in piece:
                text += char
                found = [stop for stop in self.options["stop"] if text.endswith(stop)]
                if found and place + 1 >= self.options["min_tokens"]:
                    stop = max(found, key=len)
                    return (text if self.options.get("include_stop_str_in_output") else text[:-len(stop)]), stop
        return text + (decoder.decode(b"", final=True) if is_end or is_final else ""), None


def cases(llm, seed):
    rng = random.Random(seed)
    texts = [llm.tokenizer.decode([token]) for token in range(5, V)]
    words = [text for text in texts if text.strip() and text.isascii()]
    for _ in range(NUM_CASES):
        prompt = [rng.randrange(3, V) for _ in range(rng.randint(2, 40))]
        yield prompt, draw(rng, words)


def test_every_combination_of_options_equals_a_plain_reimplementation(llm, reference):
    drawn = list(cases(llm, 11))
    params = [SamplingParams(**options) for _, options in drawn]
    num_compared = 0
    for (prompt, options), output in zip(drawn, llm.generate([prompt for prompt, _ in drawn], params), strict=True):
        plain = [Plain(llm, reference, prompt, options, choice)
                 for choice in range(options.get("best_of", options.get("n", 1)))]
        expected = [sequence.run() for sequence in plain]
        if min(sequence.margin for sequence in plain) < 1e-4:
            continue  # float32 may decide such a choice the other way
        num_compared += 1
        assert output.num_generated_tokens == sum(len(tokens) for tokens, *_ in expected)
        if "best_of" in options:
            expected.sort(key=lambda found: -sum(found[4]))
        assert len(output.outputs) == options.get("n", 1)
        for completion, (tokens, text, reason, stop, logprobs) in zip(output.outputs, expected, strict=False):
            found = (completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason)
            assert found == (tokens, text, reason, stop), options
            if "logprobs" in options:
                own = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
                assert own == pytest.approx(logprobs, abs=1e-3)
        if "prompt_logprobs" in options:
            raw = torch.log_softmax(torch.tensor(reference(prompt)), dim=-1)
            own = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
            assert own == pytest.approx([float(raw[place, token]) for place, token in enumerate(prompt[1:])], abs=1e-3)
    assert num_compared > NUM_CASES // 2


def test_every_combination_streams_what_a_call_returns(llm):
    for prompt, options in cases(llm, 12):
        whole = llm.generate(prompt, SamplingParams(**options))
        parts = list(llm.generate_async(prompt, SamplingParams(**options)))
        last = parts[-1]
        for completion, final in zip(last.outputs, whole.outputs, strict=True):
            index = completion.index
            streamed = [part.outputs[index] for part in parts]
            assert "".join(part.text_diff for part in streamed) == completion.text == final.text
            joined_ids = [token for part in streamed for token in part.token_ids_diff]
            assert joined_ids == completion.token_ids == final.token_ids
            if final.logprobs is not None:
                joined = [entry for part in streamed for entry in part.logprobs_diff]
                assert joined == completion.logprobs
                assert [list(entry) for entry in joined] == [list(entry) for entry in final.logprobs]
            assert (completion.finish_reason, completion.stop_reason) == (final.finish_reason, final.stop_reason)
        assert last.num_generated_tokens == whole.num_generated_tokens
        assert (last.prompt_logprobs is None) == (whole.prompt_logprobs is None)
        if whole.prompt_logprobs is not None:
            assert len(last.prompt_logprobs) == len(whole.prompt_logprobs) == len(prompt)
