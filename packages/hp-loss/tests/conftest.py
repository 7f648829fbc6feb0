"""Settings of the tests: no deadline, since how long an example takes says how busy the machine is."""

from hypothesis import settings

settings.register_profile("hp", deadline=None)
settings.load_profile("hp")
