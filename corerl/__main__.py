"""`python -m corerl`: the command `corerl`, of this interpreter's installation."""

import sys

from corerl.cli.main import main

if __name__ == "__main__":  # processes that reward functions are scored in import this module too
    sys.exit(main())
