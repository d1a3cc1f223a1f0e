"""`python -m paceline` is the `paceline` command."""

from paceline.tools.cli.main import main

if __name__ == "__main__":
    main()
