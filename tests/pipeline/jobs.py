"""Jobs for the tests of the frame, run by workers too."""

import os
import signal
import time

from hastore.errors import PositionLostError


def square(number):
    return number * number


def fail_at_three(number):
    if number == 3:
        raise PositionLostError("message three is gone")
    time.sleep(600)


def divide(number):
    return 1 // number


def die(number):
    """End like a process that the kernel kills for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
