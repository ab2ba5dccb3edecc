"""The jobs of `hastore pipeline` under spark-submit, with the session that it configures.

    spark-submit --master spark://host:7077 .../hastore/cli/pipeline/submit.py export --path ...

Everything after the script's name is as in `hastore pipeline`.
"""

import sys
from pathlib import Path
from typing import NoReturn


def _find_hastore() -> None:
    """Let imports find hastore, and not this folder's modules by their bare names."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    try:
        import hastore  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(here.parents[2]))


def main() -> NoReturn:
    """Run a job with the arguments of the command line, and exit with its code."""
    _find_hastore()
    from hastore.cli.common import run_code
    from hastore.cli.pipeline.group import pipeline_group

    sys.exit(run_code(pipeline_group, "submit.py", obj="submitted"))


if __name__ == "__main__":
    main()
