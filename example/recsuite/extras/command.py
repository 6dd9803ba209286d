"""The command `recsuite` of an installed library: `./run.sh` with the Python of the installation.

    recsuite train --data_path shop
    recsuite --help

It starts the scripts that the wheel has in share/recsuite, and installs nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recsuite.errors import UserError
from recsuite.files import shared_folder


def main() -> None:
    """Become run.sh; end with status 2 if it is missing."""
    try:
        script = shared_folder() / "run.sh"
        library = Path(__file__).resolve().parents[1]
        variables = {"RECSUITE_PYTHON": sys.executable, "RECSUITE_LIBRARY": str(library)}
        os.execvpe("bash", ["bash", str(script), *sys.argv[1:]], {**os.environ, **variables})
    except UserError as error:
        sys.exit(_refused(error))
    except FileNotFoundError:
        sys.exit(_refused("This requires bash, which is not installed."))


def _refused(sentence: object) -> int:
    print(f"recsuite: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
