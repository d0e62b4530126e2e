"""Ops: one name, one contract, many implementations side by side. Families are found by scanning this folder."""
