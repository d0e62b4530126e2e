"""Readers of models: Hugging Face folders and hub ids, GGUF files. Everything ends in a ``Program``."""
