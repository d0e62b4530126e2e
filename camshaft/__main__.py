"""``python -m camshaft``: the same as the ``camshaft`` command."""

from camshaft.cli.main import main

if __name__ == "__main__":
    main()
