"""`python -m rljax` is the `rljax` command."""

from rljax.cli import main

raise SystemExit(main())
