"""`python -m kbit` is the `kbit` command."""

from kbit.cli import main

if __name__ == "__main__":
    main()
