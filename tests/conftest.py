"""What all tests share: random ones print how to repeat a failure, a busy machine fails none."""

from hypothesis import settings

settings.register_profile("hastore", deadline=None, print_blob=True)
settings.load_profile("hastore")
