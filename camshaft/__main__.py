"""``python -m camshaft``: the same as the ``camshaft`` command."""

import sys

if __name__ == "__main__":
    try:
        from camshaft.cli.main import main
    except KeyboardInterrupt:  # what main() does, before there is a main()
        sys.exit(130)
    main()
