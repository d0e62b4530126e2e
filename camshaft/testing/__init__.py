"""Test tools that plugin authors use too: parity harness, tiny models, a fake model engine."""
