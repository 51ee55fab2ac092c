"""``python -m weightsync.cli``."""

from weightsync.cli import main

if __name__ == "__main__":
    main()
