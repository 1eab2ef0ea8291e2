"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A job in the background is born deaf to Ctrl-C, and so would be the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are busy: how long an example takes says nothing about the code.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")
