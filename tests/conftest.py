"""What all tests share: random ones print how to repeat a failure, a busy machine fails none, and a
crash of the interpreter leaves its traces (CONTRIBUTING.md).
"""

import os
import resource

from hypothesis import settings

settings.register_profile("hastore", deadline=None, print_blob=True)
settings.load_profile("hastore")

# pytest prints the stacks of its own process; what it starts is told to do so too.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
_, _hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (_hard, _hard))
