"""``python -m daskps``."""

from daskps.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
