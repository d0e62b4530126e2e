"""8-bit and 16-bit weights end to end: requests do not change each other, and the real model stays as good."""

import pytest

from camshaft import LLM, SamplingParams
from camshaft.testing.tiny import write_tiny_llama

FORMS = [{"quantization": "w8a16"}, {"quantization": "w8a8"}, {"weight_dtype": "bfloat16"},
         {"quantization": "w8a8", "weight_dtype": "float16"}]
ENGLISH = """The camshaft opens and closes the valves of an engine in time with its pistons. In most engines it is
driven by the crankshaft through a chain, a belt or a pair of gears, and turns at half its speed. Each lobe pushes a
follower, which lifts a valve against a spring; the shape of the lobe decides when the valve opens, how far, and for
how long. A longer opening lets more air in at high speed, but at low speed some of the charge is pushed back out
before the valve has closed. Engineers therefore choose a compromise, or build a mechanism that turns the camshaft a
little against its drive while the engine runs. Early engines kept the shaft in the block, beside the crankshaft, and
moved the valves by long rods. Later the shaft was put on top of the cylinder head, where less mass has to be moved
and the engine can turn faster. The first cars with such an engine were built before the first world war, for racing;
it took another half century before ordinary cars had them.

When the engine is cold, the oil is thick and takes a while to reach the top of the head. In those first seconds the
lobes run almost dry, and most of the wear of a whole journey may happen then. Mechanics who open an old engine look
at the lobes first: a bright, even band across the tip is a good sign, while pits or a rounded edge mean that the
valve no longer opens as far as it should. The driver notices little at first, perhaps a rough idle and a little less
power on a long hill. Then the noise begins, a light ticking that follows the speed of the engine and does not go away
when it is warm. A new shaft is not expensive, but reaching the old one takes most of a day, and the followers ought
to be replaced at the same time, because each pair has worn to the shape of the other."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))
def test_a_request_alone_and_among_others_gets_the_same_tokens(tmp_path, form):
    model = write_tiny_llama(tmp_path / "model", seed=4)
    prompts = [[5, 6, 7], list(range(40, 90)), [9], [200 + i % 50 for i in range(70)], [11, 12, 13, 14, 15, 16, 17]]
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(model, device="cpu", max_batch_size=8, max_num_tokens=64, use_cache=False, kv_cache={"max_bytes": 2**24},
             **form) as llm:
        alone = [llm.generate(prompt, greedy).outputs[0].token_ids for prompt in prompts]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def mean_nll(model, **form):
    """Mean negative log-likelihood, in nats, of the tokens of a text that is in no training set."""
    with LLM(model, device="cpu", kv_cache={"max_bytes": 2**27}, **form) as llm:
        output = llm.generate(ENGLISH, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    losses = [-found[token].logprob for token, found in
              zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]
    assert len(losses) > 400
    return sum(losses) / len(losses)


@pytest.mark.slow
def test_the_default_model_finds_a_real_text_as_likely_as_in_fp32(smollm2_gguf):
    wide = mean_nll(smollm2_gguf)
    assert 1 < wide < 5
    for form in (*FORMS, {"quantization": "fp8"}):
        assert mean_nll(smollm2_gguf, **form) == pytest.approx(wide, rel=1e-2), form
