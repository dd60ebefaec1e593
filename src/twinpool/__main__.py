"""`python -m twinpool` is `twinpool`."""

from twinpool.cli.main import main

if __name__ == "__main__":
    main()
