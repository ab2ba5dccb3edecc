"""Run the command `hastore` by `python -m hastore`."""

from hastore.cli.main import main

main()
