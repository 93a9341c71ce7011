"""`python -m weft.cli`, for launchers that start a module, such as `torchrun -m weft.cli bench ...`."""

from weft.cli import main

if __name__ == "__main__":
    main()
