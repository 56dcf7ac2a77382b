"""`python -m forerun.cli`: the command line."""

from forerun.cli.main import console

if __name__ == "__main__":
    console()
