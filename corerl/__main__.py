"""`python -m corerl`: the command `corerl`, of this interpreter's installation."""

import sys

if __name__ == "__main__":  # processes that reward functions are scored in import this module too
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, which the command puts last
    from corerl.cli.main import main

    sys.exit(main())
