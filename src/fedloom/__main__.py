"""``python -m fedloom``: the command line, for launchers such as torchrun that start modules."""

from fedloom.cli import main

if __name__ == "__main__":
    main()
