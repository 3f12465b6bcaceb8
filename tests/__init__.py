"""The tests mirror the packages."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # an example's seconds say nothing here
settings.load_profile("shared machine")
