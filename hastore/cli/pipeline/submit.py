"""The jobs of `hastore pipeline` under spark-submit, with the session that it configures.

    spark-submit --master spark://host:7077 .../hastore/cli/pipeline/submit.py export --path ...

Everything after the script's name is as in `hastore pipeline`. spark-submit merges stderr into
stdout, so the summary, or the error, is the last line of both.
"""

import sys
import warnings
from pathlib import Path
from typing import NoReturn


def _find_hastore() -> None:
    """Import the hastore that this file belongs to, and no module of this folder by its bare name.

    Python has put this folder in its path, because it runs this file.
    """
    here = Path(__file__).resolve().parent
    root = str(here.parents[2])
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    if root not in sys.path:
        sys.path.insert(0, root)


def main() -> NoReturn:
    """Run a job with the arguments of the command line, and exit with its code."""
    _find_hastore()
    # It does not matter: hastore does not use pandas there.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    from hastore.cli.common import run_code
    from hastore.cli.main import pipeline_group

    sys.exit(run_code(pipeline_group, "submit.py", obj="submitted"))


if __name__ == "__main__":
    main()
