"""`python -m forerun.launch_server`: starts a server as SGLang does, with its options."""

import sys

from forerun.cli.main import console

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    console()
