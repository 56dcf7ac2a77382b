"""`python -m forerun.launch_server`: SGLang's way to start a server, with its options."""

import sys

from forerun.cli.main import console

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    console()
