"""Write the output of every scenario into its file: python tests/dledger/core/regenerate.py.

Read the differences before you commit them.
"""

import pathlib
import sys

if __name__ == "__main__":
    root = pathlib.Path(__file__).resolve().parents[3]
    sys.path.insert(0, str(root))
    from tests.dledger.core.scenario import run

    for path in sorted((root / "tests/dledger/core/scenarios").glob("*.txt")):
        path.write_text(run(path))
