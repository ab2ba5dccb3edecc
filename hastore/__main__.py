"""`python -m hastore`: the command `hastore`."""

from hastore.cli.main import main

main()
