"""The ``camshaft`` command."""
