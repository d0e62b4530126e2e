"""What other engines call an option, so that a name carried over from them is answered with the one used here.

Owns hints for errors; nothing in here is accepted as an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ALWAYS_CHUNKED = 'Leave it out: prompts are cut as needed; scheduler={"context_chunk_tokens": …} bounds a chunk'
_ONE_DEVICE = "Leave it out: this version runs on one device"

HINTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "LLM": MappingProxyType({
        "backend": "Leave it out: there is one",
        "block_size": "Here it is page_size",
        "build_config": "Here it is build",
        "data_parallel_size": _ONE_DEVICE,
        "download_dir": "Set the environment variable CAMSHAFT_CACHE_DIR",
        "enable_block_reuse": 'Here it is kv_cache={"enable_block_reuse": …}',
        "enable_chunked_context": _ALWAYS_CHUNKED,
        "enable_chunked_prefill": _ALWAYS_CHUNKED,
        "enable_lora": "Leave it out: this version has no adapters",
        "enable_prefix_caching": 'Here it is kv_cache={"enable_block_reuse": …}',
        "free_gpu_memory_fraction": 'Here it is kv_cache={"memory_fraction": …}',
        "gpu_memory_utilization": 'Here it is kv_cache={"memory_fraction": …}, a share of the memory that is free',
        "hf_token": "Here it is token",
        "kv_cache_config": "Here it is kv_cache",
        "max_model_len": "Here it is max_seq_len",
        "max_num_batched_tokens": "Here it is max_num_tokens",
        "max_num_seqs": "Here it is max_batch_size",
        "num_gpu_blocks_override": 'Here it is kv_cache={"max_bytes": …}',
        "pipeline_parallel_size": _ONE_DEVICE,
        "quant_config": "Here it is quantization",
        "scheduler_config": "Here it is scheduler",
        "scheduling_policy": 'Here it is scheduler={"queue_policy": …}',
        "seed": "Here it is SamplingParams(seed=…), one a request",
        "speculative_config": "Leave it out: this version has no speculation",
        "tensor_parallel_size": _ONE_DEVICE,
        "tokenizer": "Leave it out: the tokenizer is the checkpoint's own",
        "tokens_per_block": "Here it is page_size",
        "trust_remote_code": "Leave it out: code in a checkpoint is never run",
    }),
    "kv_cache": MappingProxyType({
        "dtype": "Leave it out: the cache has the dtype of the build",
        "free_gpu_memory_fraction": "Here it is memory_fraction",
        "host_cache_size": "Leave it out: this version keeps no pages elsewhere",
        "max_attention_window": "Here it is LLM(max_attention_window=…)",
        "max_gpu_total_bytes": "Here it is max_bytes",
        "max_tokens": "Here it is max_bytes",
        "sink_token_length": "Here it is LLM(sink_tokens=…)",
        "tokens_per_block": "Here it is LLM(page_size=…)",
    }),
    "scheduler": MappingProxyType({
        "capacity_scheduler_policy": "Here it is capacity_policy",
        "scheduling_policy": "Here it is queue_policy",
    }),
    "SamplingParams": MappingProxyType({
        "bad_words": "Here it is bad",
        "do_sample": "Leave it out: a temperature above 0 samples",
        "embedding_bias": "Here it is logit_bias, a dict of token ids",
        "eos_token_id": "Here it is end_id",
        "max_new_tokens": "Here it is max_tokens",
        "num_return_sequences": "Here it is n",
        "random_seed": "Here it is seed",
        "stop_words": "Here it is stop",
        "structured_outputs": "Leave it out: this version has no grammars",
        "truncate_prompt_tokens": "Leave it out, and cut the prompt's token ids",
    }),
})
"""Where an option was given → the name it bears elsewhere → what to do here."""
