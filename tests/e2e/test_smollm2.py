"""The real default model: greedy tokens against transformers on the same dequantised weights, and a chat answer."""

import pytest
import torch

from camshaft import LLM, SamplingParams
from camshaft.frontend.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow
NUM_NEW = 64
ENGLISH = ("The camshaft opens and closes the valves of an engine in time with its pistons. In most engines it is "
           "driven by the crankshaft through a chain, a belt or a pair of gears, and turns at half its speed. ")
CODE = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n"
CHINESE = "今天天气很好，我们一起去公园散步，看见了许多美丽的花。"
JAPANESE = "エンジンのカムシャフトは、バルブを正しいタイミングで開閉します。"
EMOJI = "The weather 🌦️ is great 👍🏽 today! 🚗💨 👨‍👩‍👧‍👦 "


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    with LLM(smollm2_gguf, kv_cache={"max_bytes": 2**29}) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(smollm2_gguf)
    shape = checkpoint.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, rms_norm_eps=shape.norm_eps,
        max_position_embeddings=shape.max_position, tie_word_embeddings=shape.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta})
    model = LlamaForCausalLM(config).eval()
    state = {name: weight.read().float() for name, weight in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def prompts(tokenizer):
    """Twenty prompts of 1 to about 2,000 tokens."""
    texts = ["A", "Hello", "The capital of France is", "Once upon a time", "1, 2, 3, 4,", "import os\n", CHINESE,
             JAPANESE, EMOJI, CODE, ENGLISH, "Q: What is 2 + 2?\nA:", "I'm sure you don't know what it's",
             CODE * 3, CHINESE * 4, EMOJI * 5, JAPANESE * 6 + CODE, ENGLISH * 8, ENGLISH * 16 + CHINESE]
    drawn = [tokenizer.encode(text) for text in texts]
    drawn[0] = drawn[0][:1]
    return [*drawn, tokenizer.encode((ENGLISH + CODE + EMOJI) * 20)[:2000]]


def test_greedy_tokens_equal_transformers(llm, reference):
    asked = prompts(llm.tokenizer)
    lengths = sorted(map(len, asked))
    assert (len(asked), lengths[0], lengths[-1]) == (20, 1, 2000)
    outputs = llm.generate(asked, SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True))
    wrong = []
    for index, output in enumerate(outputs):
        answer = output.outputs[0].token_ids
        assert len(answer) == NUM_NEW
        with torch.inference_mode():
            logits = reference(torch.tensor([asked[index] + answer[:-1]]), logits_to_keep=NUM_NEW).logits[0]
        best = logits.argmax(-1).tolist()
        wrong += [(index, position, best[position], token) for position, token in enumerate(answer)
                  if best[position] != token]
    assert wrong == []
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 100


def test_it_answers(llm):
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=32))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    ids = answer.prompt_token_ids
    assert ids[0] == llm.tokenizer.token_to_id("<|im_start|>")
    assert ids[1] != ids[0], "one beginning of sequence, the template's"


def test_a_shared_prefix_is_computed_once(llm):
    prefix = llm.tokenizer.encode("Shared by two. " + ENGLISH * 16)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    first = llm.generate(prefix + llm.tokenizer.encode(" First"), params)
    second = llm.generate(prefix + llm.tokenizer.encode(" Second"), params)
    assert second.num_cached_tokens >= len(prefix) // 16 * 16
    assert first.num_cached_tokens < 16
